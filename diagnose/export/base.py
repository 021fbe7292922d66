"""What an exporter is: something that takes readings of a run to one other tool."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from diagnose.core.errors import DiagnoseError
from diagnose.core.plugins import only_subclass
from diagnose.core.profile import RunInfo
from diagnose.export._reading import Reading

Write = Callable[[Reading], str]
"""Takes one reading, and says in a few words where it went."""


class Exporter(ABC):
    """One tool that figures of a run can be taken to.

    Attributes:
        target: What stands behind the `=` of `--to NAME=TARGET`, in capitals, for the help.
        requires: Modules it imports, each with the distribution that `pip install` gets it from.
        live: Whether it takes figures while the run goes on, too; else only the last, when it has ended.
    """

    target: ClassVar[str]
    requires: Mapping[str, str] = MappingProxyType({})
    live: ClassVar[bool] = True

    @abstractmethod
    def default_target(self, run: RunInfo) -> str:
        """Returns the target where the user named none."""

    @abstractmethod
    def open(self, target: str, run: RunInfo) -> AbstractContextManager[Write]:
        """Opens the target for one run. What is written is complete when the context is left.

        Raises:
            DiagnoseError: If it cannot be opened.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """An exporter by name, and where the user wants it to write; `None` for its own choice."""

    name: str
    target: str | None = None

    @classmethod
    def parse(cls, text: str) -> Destination:
        """Reads `NAME` or `NAME=TARGET`.

        Raises:
            DiagnoseError: If there is no such exporter.
        """
        name, separator, target = text.partition("=")
        if name not in exporter_names():
            known = ", ".join(exporter_names())
            raise DiagnoseError(f"export: there is no {name!r} to export to. There are: {known}.")
        if separator and not target:
            raise DiagnoseError(f"export: {text!r} names no target. Leave the '=' out for the usual one.")
        return cls(name=name, target=target or None)

    def exporter(self) -> Exporter:
        """Returns the exporter, once it is sure that what it imports is installed.

        Raises:
            DiagnoseError: If it is not.
        """
        module = importlib.import_module(f"diagnose.export.{self.name.replace('-', '_')}")
        exporter = only_subclass(module, Exporter)()  # type: ignore[type-abstract]
        missing = [install for name, install in exporter.requires.items() if not _is_installed(name)]
        if missing:
            packages = " ".join(dict.fromkeys(missing))
            raise DiagnoseError(
                f"export to {self.name}: {packages} is not installed in this Python.\n"
                f"Install it: pip install {packages}"
            )
        return exporter

    def check(self) -> None:
        """Finds now, not after hours of training, what would keep a run from being exported.

        Raises:
            DiagnoseError: If something would.
        """
        exporter = self.exporter()
        if exporter.target not in ("FILE", "FOLDER"):
            return
        path = Path(self.target or "a file of its own").absolute()
        folder = path.parent
        if exporter.target == "FOLDER":  # it is made, with those around it
            folder = next(each for each in (path, *path.parents) if each.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise DiagnoseError(
                f"export to {self.name}: cannot write {self.target or 'here'}: "
                f"{folder} is no folder that takes files."
            )
        if exporter.target == "FILE" and path.is_dir():
            raise DiagnoseError(f"export to {self.name}: cannot write {self.target}: it is a folder.")


def exporter_names() -> tuple[str, ...]:
    """Returns the names of all exporters, without importing one."""
    from diagnose import export

    files = (info.name for info in pkgutil.iter_modules(export.__path__))
    return tuple(sorted(n.replace("_", "-") for n in files if n != "base" and not n.startswith("_")))


def imported(module: str, exporter: str, install: str) -> Any:
    """Imports a library that an exporter writes with.

    Raises:
        DiagnoseError: If it is there and cannot be imported, as when a part of it is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DiagnoseError(
            f"export to {exporter}: {module} cannot be imported ({error}).\n"
            f"Install it: pip install {install}"
        ) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package around it is missing, or half imported
        return False
