"""`diagnose gate`: fails a change that made training slower, and says so only when it can be believed."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diagnose.cli._gate import (
    BEFORE_SCRIPT,
    OUR_BUG,
    Budget,
    KeptIn,
    Steps,
    Warmup,
    Words,
    asked_of,
    folder_for_runs,
    own_exit_codes,
    quoted_command,
    refuse_destination,
    refuse_metric,
    training_command,
)
from diagnose.cli._output import STDOUT, WIDEST, Json, as_json, put, show
from diagnose.core.errors import DiagnoseError

if TYPE_CHECKING:
    from diagnose.gate.pairs import Asked
    from diagnose.gate.result import GateResult

EXIT_CODES = (
    "Exit codes: 0 pass; 1 regression; 2 wrong call; 3 cannot tell (too noisy, too few steps); "
    "4 no baseline, or one of another machine; 5 the training command failed, hangs or does not train; "
    "70 an error of diagnose itself."
)


OPTIONS = {"context_settings": BEFORE_SCRIPT, "epilog": EXIT_CODES}


def gate(
    words: Words = None,
    ab: Annotated[
        str | None,
        typer.Option("--ab", metavar="BASE..HEAD", help="Compare two commits, in git worktrees."),
    ] = None,
    base_cmd: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Compare two commands: the one before.")
    ] = None,
    head_cmd: Annotated[str | None, typer.Option(metavar="COMMAND", help="The one after.")] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Compare with earlier jobs: .diagnose/baselines, or a file there."
        ),
    ] = None,
    max_drop: Annotated[str, typer.Option(metavar="SHARE", help="The drop that is still allowed.")] = "3%",
    metric: Annotated[
        str,
        typer.Option(
            metavar="METRIC",
            help="samples_per_s, mean_samples_per_s (with every stall), tokens_per_s, step_ms, cpu_ms, "
            "instructions, peak_memory (of the host), peak_device_memory or startup.",
        ),
    ] = "samples_per_s",
    budget: Budget = None,
    steps: Steps = None,
    warmup: Warmup = None,
    inconclusive: Annotated[
        str | None, typer.Option(metavar="pass|fail", help="Exit 0 or 1 where it cannot tell. [default: 3]")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH", help="Show a path that git does not hold, such as data, to both commits."
        ),
    ] = None,
    in_turns: Annotated[
        bool,
        typer.Option(
            "--in-turns",
            help="Run both versions at once, each for a moment while the other is stopped: for a noisy "
            "machine. One process, on CPUs.",
        ),
    ] = False,
    allow_machine_mismatch: Annotated[
        bool,
        typer.Option("--allow-machine-mismatch", help="Show another machine's baseline; never passes."),
    ] = False,
    json: Json = None,
    junit: Annotated[Path | None, typer.Option(metavar="PATH", help="Write a JUnit file.")] = None,
    gitlab: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write a code quality report for GitLab.")
    ] = None,
    run_dir: KeptIn = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the call and say what would be done; run nothing.")
    ] = False,
) -> None:
    """Says whether a change made training slower: pass, regression, or cannot tell.

    Runs both versions in turn, 7 to 20 times each, and compares neighbouring runs.

    Several ranks: DIAGNOSE_NPROC_PER_NODE=8 diagnose gate ...

    In GitHub Actions it also annotates the lines to blame and writes the step's summary.
    """
    if inconclusive not in (None, "pass", "fail"):
        raise DiagnoseError(f"gate: --inconclusive is pass or fail, not {inconclusive!r}.")
    with own_exit_codes("gate"):
        asked = replace(asked_of(metric, max_drop, steps, warmup, budget), in_turns=in_turns)
        commands = _commands(words, ab, base_cmd, head_cmd, baseline)
        if link and ab is None:
            raise DiagnoseError("gate: --link is for the worktrees of --ab: without it there are none.")
        if in_turns and baseline is not None:
            raise DiagnoseError("gate: --in-turns is for two versions: of a --baseline only one is run.")
        if allow_machine_mismatch and baseline is None:
            raise DiagnoseError("gate: --allow-machine-mismatch is for --baseline, which is not asked for.")
        for path in (junit, gitlab, Path(json) if json not in (None, STDOUT) else None):
            if path is not None:
                refuse_destination("gate", path)
        refuse_metric(asked, has_history=baseline is not None)
        if dry_run:
            _plan(ab, commands, baseline, asked)
            return
        folder = folder_for_runs(run_dir, "gate")
        if baseline is not None:
            result = _with_history(commands[1], asked, baseline, folder, allow_machine_mismatch)
        else:
            result = _versions(ab or "", commands, tuple(link or ()), asked, folder)
        code = _exit_code(result, inconclusive)
        _report(result, code, json, junit, gitlab, folder)
    raise typer.Exit(code)


def _commands(
    words: list[str] | None,
    ab: str | None,
    base_cmd: str | None,
    head_cmd: str | None,
    baseline: Path | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the commands of base and head, once it is clear what is to be compared."""
    two = base_cmd is not None or head_cmd is not None
    if [ab is not None, two, baseline is not None].count(True) != 1:
        raise DiagnoseError(
            "gate: say what to compare with, in one way: --ab BASE..HEAD, --base-cmd and --head-cmd, "
            "or --baseline PATH."
        )
    if not two:
        return (training_command(list(words or ())),) * 2
    if base_cmd is None or head_cmd is None or words:
        raise DiagnoseError("gate: --base-cmd and --head-cmd go together, and without another command.")
    return quoted_command(base_cmd, "--base-cmd"), quoted_command(head_cmd, "--head-cmd")


def _versions(
    ab: str,
    commands: tuple[tuple[str, ...], tuple[str, ...]],
    links: tuple[str, ...],
    asked: Asked,
    folder: Path,
) -> GateResult:
    from diagnose.gate.compare_commits import GateRequest, Plumbing, compare_versions
    from diagnose.gate.why import explain

    request = GateRequest(
        asked=asked, commits=ab, commands=commands, links=links, cwd=Path.cwd(), folder=folder
    )
    return compare_versions(request, Plumbing(progress=_progress, explain=explain))


def _with_history(
    command: tuple[str, ...], asked: Asked, place: Path, folder: Path, allow_mismatch: bool
) -> GateResult:
    from diagnose.gate.compare_commits import Plumbing
    from diagnose.gate.compare_history import compare_with_history
    from diagnose.gate.result import Side
    from diagnose.gate.worktrees import inside_repository

    here = Path.cwd()
    side = Side(
        label="head", name="this version", root=here, folder=inside_repository(here), command=command
    )
    plumbing = Plumbing(progress=_progress)
    return compare_with_history(
        side, asked, place, folder, allow_mismatch=allow_mismatch, plumbing=plumbing
    )


def _progress(text: str) -> None:
    print(f"gate: {text}", file=sys.stderr, flush=True)


def _plan(
    ab: str | None, commands: tuple[tuple[str, ...], ...], baseline: Path | None, asked: Asked
) -> None:
    """Says what would be done, after checking what can be checked without running anything."""
    from diagnose.gate.statistics import MAX_PAIRS, MIN_PAIRS
    from diagnose.gate.words import format_percent
    from diagnose.gate.worktrees import repository_of, resolve_range, uncommitted

    lines = []
    if ab is not None:
        repository = repository_of(Path.cwd())
        for label, (name, commit) in zip(("base", "head"), resolve_range(repository, ab), strict=True):
            lines.append(f"{label}: {name} ({commit[:12]}) in a worktree of its own")
        changed = uncommitted(repository)
        lines += [changed] if changed else []
    if baseline is not None:
        lines.append(f"baseline: {baseline}{'' if baseline.exists() else ' (not there yet)'}")
    else:
        how = "made at once, in turns" if asked.in_turns else "in the order base, head, head, base"
        lines.append(f"{MIN_PAIRS} to {MAX_PAIRS} pairs of runs {how}")
    lines += [f"command: {shlex.join(each)}" for each in dict.fromkeys(commands)]
    lines.append(f"fails where {asked.metric.label} is more than {format_percent(asked.max_drop)} worse")
    show("\n".join(lines) + "\n")


def _report(
    result: GateResult, code: int, json: str | None, junit: Path | None, gitlab: Path | None, folder: Path
) -> None:
    from diagnose.gate import as_github
    from diagnose.gate.as_gitlab import to_gitlab
    from diagnose.gate.as_json import to_json
    from diagnose.gate.as_junit import to_junit
    from diagnose.gate.as_text import gate_text
    from diagnose.report import Terminal

    answer = as_json({**to_json(result), "exit_code": code})
    stream = sys.stderr if json == STDOUT else sys.stdout
    text = gate_text(result, Terminal.of(stream, widest=WIDEST))
    if as_github.is_github():
        commands = as_github.workflow_commands(result)
        text = as_github.not_obeyed(text) + "".join(f"{line}\n" for line in commands)
        step = os.environ.get("GITHUB_STEP_SUMMARY")
        if step:
            with contextlib.suppress(OSError):
                as_github.append_summary(result, Path(step))
    if stream is sys.stdout:
        show(text)
    else:
        stream.write(text)
    with contextlib.suppress(OSError):  # beside the runs, for later; the verdict stands without
        (folder / "gate.json").write_text(answer, encoding="utf-8")
    outputs = (
        (answer, json),
        (to_junit(result), None if junit is None else str(junit)),
        (to_gitlab(result), None if gitlab is None else str(gitlab)),
    )
    failures = []
    for content, path in outputs:
        try:
            if path is not None:
                put(content, path)
        except DiagnoseError as error:  # the verdict stands, and so do the other files
            failures.append(str(error))
    if failures:
        print("\n".join(failures), file=sys.stderr)
        raise typer.Exit(code or OUR_BUG)


def _exit_code(result: GateResult, inconclusive: str | None) -> int:
    from diagnose.gate.result import Verdict

    if result.verdict is Verdict.INCONCLUSIVE and inconclusive is not None:
        return 0 if inconclusive == "pass" else 1
    return result.verdict.exit_code
