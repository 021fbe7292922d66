"""The `diagnose` command: finds its verbs by looking into this folder."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated

import typer

import diagnose.cli
from diagnose import __version__
from diagnose.core.errors import DiagnoseError

app = typer.Typer(
    name="diagnose",
    help="Says where every millisecond of a PyTorch training step goes, on unmodified scripts.",
    epilog="Start with:  diagnose run train.py",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # no traceback may ever stand in for the script's
    rich_markup_mode=None,  # plain help is the same everywhere, and spares the import of rich
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"diagnose {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def add_commands() -> None:
    """Adds the verb of each file of this folder."""
    for info in pkgutil.iter_modules(diagnose.cli.__path__):
        if info.name != "main" and not info.name.startswith("_"):
            add_command(app, info.name)


def add_command(app: typer.Typer, name: str) -> None:
    """Adds what a file defines under its own name: a function, with typer's `OPTIONS` where it has any, or
    a group of verbs."""
    module = importlib.import_module(f"diagnose.cli.{name}")
    verb = getattr(module, name)
    if isinstance(verb, typer.Typer):
        app.add_typer(verb, name=name)
    else:
        app.command(name, **getattr(module, "OPTIONS", {}))(verb)


def main() -> None:
    """Runs the command line. Exits 2 where the user can mend what went wrong, after saying what it is."""
    add_commands()
    try:
        app(prog_name="diagnose")
    except DiagnoseError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
