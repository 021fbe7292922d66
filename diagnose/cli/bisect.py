"""`diagnose bisect`: finds the commit that made training slower, though every measurement errs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from diagnose.cli._gate import (
    BEFORE_SCRIPT,
    Budget,
    KeptIn,
    Steps,
    Warmup,
    Words,
    asked_of,
    folder_for_runs,
    own_exit_codes,
    refuse_destination,
    refuse_metric,
    training_command,
)
from diagnose.cli._output import STDOUT, Json, as_json, put, show, terminal

EXIT_CODES = (
    "Exit codes: 0 a commit was found; 2 wrong call; 3 cannot tell, or nothing was lost between the two; "
    "5 the training command failed on the first or the last commit; 70 an error of diagnose itself."
)


class OptionsOnBothSides(TyperCommand):
    """Takes our options before and after GOOD..BAD, and leaves alone whatever follows the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts GOOD..BAD behind the options that follow it, where parsing ends at the script."""
        if args and not args[0].startswith("-"):
            end = 1
            while end < len(args) and args[end].startswith("--") and args[end] != "--":
                takes_value = "=" not in args[end] and args[end] != "--help"  # all of ours but that do
                end += 2 if takes_value else 1
            args = [*args[1:end], args[0], *args[end:]]
        return list(super().parse_args(ctx, args))


OPTIONS = {"cls": OptionsOnBothSides, "context_settings": BEFORE_SCRIPT, "epilog": EXIT_CODES}


def bisect(
    commits: Annotated[
        str, typer.Argument(metavar="GOOD..BAD", help="A fast commit and a later, slow one.")
    ],
    words: Words = None,
    max_drop: Annotated[
        str, typer.Option(metavar="SHARE", help="The least loss that is worth searching for.")
    ] = "3%",
    metric: Annotated[
        str, typer.Option(metavar="METRIC", help="See diagnose gate --help.")
    ] = "samples_per_s",
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, metavar="ODDS", help="Odds at which a commit is named.")
    ] = 0.95,
    budget: Budget = None,
    max_pairs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Pairs to measure at most between the two ends.")
    ] = 100,
    steps: Steps = None,
    warmup: Warmup = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH", help="Show a path that git does not hold, such as data, to each commit."
        ),
    ] = None,
    json: Json = None,
    run_dir: KeptIn = None,
) -> None:
    """Finds the commit that made training slower, with its odds, and says what in it did.

    Measures pairs of the first commit and one in between, each time the one whose answer is most open.
    One wrong answer does not mislead it: a commit is measured again until its odds suffice.
    """
    from diagnose.gate.as_bisect import bisect_text, to_json
    from diagnose.gate.as_github import is_github, not_obeyed
    from diagnose.gate.bisect import bisect as search
    from diagnose.gate.bisection import BisectRequest

    words = list(words or ())
    if words[:1] == ["--"]:  # it stands behind GOOD..BAD, where parsing has ended
        words.pop(0)
    asked = asked_of(metric, max_drop, steps, warmup, budget)
    if json is not None and json != STDOUT:
        refuse_destination("bisect", Path(json))
    refuse_metric(asked)
    request = BisectRequest(
        asked=asked,
        commits=commits,
        command=training_command(words, verb="bisect v1.2..main"),
        links=tuple(link or ()),
        confidence=confidence,
        max_pairs=max_pairs,
        cwd=Path.cwd(),
        folder=folder_for_runs(run_dir, "bisect").absolute(),
    )
    with own_exit_codes("bisect", "nothing was found"):
        found = search(request, progress=lambda text: print(f"bisect: {text}", file=sys.stderr, flush=True))
        if json is not None:
            put(as_json(to_json(found)), json)
        if json != STDOUT:
            text = bisect_text(found, terminal())
            show(not_obeyed(text) if is_github() else text)
    raise typer.Exit(found.ending.exit_code)
