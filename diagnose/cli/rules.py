"""`diagnose rules`: lists the faults that are looked for, and explains one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from diagnose.cli._output import Json, answer, terminal


def rules(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Explain this one.")] = None,
    json: Json = None,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Show how good the predicted gains were.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a page per built-in rule, as markdown.")
    ] = None,
) -> None:
    """Lists the faults that are looked for, or explains one."""
    from diagnose import report
    from diagnose.rules import built_in, find_rule, own_rules
    from diagnose.rules import rules as all_rules

    if write is not None:
        changed = report.write_pages(write, report.rule_pages(built_in()))
        print(f"wrote {len(built_in()) + 1} pages to {write}, {len(changed)} of them new", file=sys.stderr)
        return
    if calibration:
        from diagnose.store.gains import read_predictions

        tried = read_predictions()
        answer(json, report.calibration_json(tried), report.calibration_text(tried, terminal()))
    elif name is not None:
        known = all_rules()
        rule = find_rule(name, known)
        answer(json, report.rules_json({name: rule}), report.rule_text(name, rule, terminal()))
    else:
        for problem in own_rules(built_in()).broken:
            print(f"diagnose: {problem}", file=sys.stderr)
        answer(json, report.rules_json(all_rules()), report.rules_text(all_rules(), terminal()))
