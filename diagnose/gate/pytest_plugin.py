"""A pytest plugin: gates a training function or script inside a test.

Loaded at every start of pytest where this package is installed, so it imports next to nothing; what it
does, it does in the fixture. See docs/ci.md.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from diagnose.gate.pairs import Asked
    from diagnose.gate.result import GateResult

MARKER = "diagnose_gate"
BASE_VARIABLE = "DIAGNOSE_GATE_BASE"
OPTIONS = ("max_drop", "base", "baseline", "metric", "steps", "warmup", "budget", "inconclusive", "link")
OUTCOMES = ("skip", "fail", "pass")

Gate = Callable[..., Any]


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known, so that --strict-markers accepts it."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(max_drop='3%', base=None, baseline=None, metric='samples_per_s', steps=None, "
        "warmup=None, budget=None, inconclusive='skip', link=()): what the fixture diagnose_gate compares "
        "with, and when it fails",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses a test that is marked and does not use the fixture: it would gate nothing, and look as if."""
    for item in items:
        if item.get_closest_marker(MARKER) is not None and MARKER not in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(
                f"{item.nodeid} is marked {MARKER} but does not use the fixture of that name, so it would "
                f"measure nothing. Give it the argument {MARKER}, and call that with what trains."
            )


@pytest.fixture
def diagnose_gate(request: pytest.FixtureRequest, tmp_path: Path) -> Gate:
    """Returns a function that gates what it is given: a function, or a script and its arguments.

    It fails the test on a regression, skips it where the gate cannot tell (or fails or passes it, by
    `inconclusive="fail"` or `"pass"`), and returns the `GateResult`.
    """
    marker = request.node.get_closest_marker(MARKER)
    options = dict(marker.kwargs) if marker is not None else {}
    if marker is not None and (marker.args or set(options) - set(OPTIONS)):
        wrong = [*map(repr, marker.args), *sorted(set(options) - set(OPTIONS))]
        pytest.fail(
            f"{MARKER} does not take {', '.join(wrong)}; it takes {', '.join(OPTIONS)}, each by its name.",
            pytrace=False,
        )
    root, numbers = request.config.rootpath, itertools.count(1)

    def gate(what: Callable[[], object] | str | Path, *arguments: str) -> GateResult:
        # The runs of one call are not those of the next.
        return _judged(_command(what, arguments, root), options, root, tmp_path / f"gate-{next(numbers)}")

    return gate


def _judged(command: tuple[str, ...], options: dict[str, Any], root: Path, folder: Path) -> GateResult:
    from diagnose.core.errors import DiagnoseError
    from diagnose.gate.as_github import harmless, is_github
    from diagnose.gate.as_text import gate_text
    from diagnose.gate.result import Verdict
    from diagnose.report import Terminal

    shown = harmless if is_github() else str
    outcome = options.get("inconclusive", "skip")
    if outcome not in OUTCOMES:
        pytest.fail(
            f"{MARKER}: inconclusive is one of {', '.join(OUTCOMES)}, not {outcome!r}.", pytrace=False
        )
    folder.mkdir(parents=True)
    try:
        result = _compared(command, options, root, folder)
    except DiagnoseError as error:
        pytest.fail(shown(str(error)), pytrace=False)
    except SystemExit as ended:  # which pytest would take for a failure of this one test
        pytest.exit("a signal ended the gate", returncode=int(ended.code or 0))
    text = shown(gate_text(result, Terminal()))
    if result.verdict in (Verdict.REGRESSION, Verdict.FAILED):
        pytest.fail(text, pytrace=False)
    if result.verdict in (Verdict.INCONCLUSIVE, Verdict.MISMATCH):
        if outcome == "fail":
            pytest.fail(text, pytrace=False)
        if outcome == "skip" or result.verdict is Verdict.MISMATCH:  # which never passes
            pytest.skip(text)
    print(text)
    return result


def _compared(command: tuple[str, ...], options: dict[str, Any], root: Path, folder: Path) -> GateResult:
    from diagnose.core.errors import DiagnoseError
    from diagnose.gate.compare_commits import GateRequest, Plumbing, compare_versions
    from diagnose.gate.compare_history import compare_with_history
    from diagnose.gate.result import Side
    from diagnose.gate.why import explain

    asked, plumbing = _asked(options), Plumbing(explain=explain)
    baseline, base = options.get("baseline"), os.environ.get(BASE_VARIABLE) or options.get("base")
    links = options.get("link", ())
    if baseline is not None:
        side = Side(label="head", name="this version", root=root, command=command)
        place = root / baseline
        return compare_with_history(side, asked, place, folder, allow_mismatch=False, plumbing=plumbing)
    if base is None:
        raise DiagnoseError(
            f"{MARKER}: say what to compare with: base='main' or baseline='.diagnose/baselines' in the "
            f"marker, or the variable {BASE_VARIABLE}."
        )
    request = GateRequest(
        asked=asked,
        commits=f"{_known(base, root)}..HEAD",
        commands=(command, command),
        links=(links,) if isinstance(links, str) else tuple(links),
        cwd=root,
        folder=folder,
    )
    return compare_versions(request, plumbing)


def _known(base: str, root: Path) -> str:
    """Returns a name that is known here: a CI system's checkout has no branch `main`, but `origin/main`."""
    from diagnose.core.errors import DiagnoseError
    from diagnose.gate.worktrees import commit_of, repository_of

    repository = repository_of(root)
    for name in (base, f"origin/{base}"):
        with contextlib.suppress(DiagnoseError):
            commit_of(repository, name)
            return name
    return base  # what is wrong with it, the gate will say


def _asked(options: dict[str, Any]) -> Asked:
    from diagnose.gate.pairs import Asked
    from diagnose.gate.result import Metric

    names = [metric.value for metric in Metric]
    metric, drop = options.get("metric", "samples_per_s"), options.get("max_drop", 0.03)
    if metric not in names:
        pytest.fail(
            f"{MARKER}: there is no metric {metric!r}. There are: {', '.join(names)}.", pytrace=False
        )
    try:  # as the command line reads it, which is not for us to import
        share = float(str(drop).strip().removesuffix("%")) / (100 if "%" in str(drop) else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        pytest.fail(f"{MARKER}: max_drop is '3%' or 0.03, not {drop!r}.", pytrace=False)
    budget = options.get("budget")
    return Asked(
        metric=Metric(metric),
        max_drop=share,
        steps=options.get("steps"),
        warmup=options.get("warmup"),
        budget_s=math.inf if budget is None else 60 * budget,
    )


def _command(
    what: Callable[[], object] | str | Path, arguments: tuple[str, ...], root: Path
) -> tuple[str, ...]:
    """Returns the training command; of a function, one that calls it in a process of its own."""
    if isinstance(what, (str, Path)):
        return (str(what), *arguments)
    name = getattr(what, "__qualname__", "")
    code = getattr(what, "__code__", None)
    file = Path(code.co_filename) if code is not None else Path()
    if code is None or "<" in name or not file.is_relative_to(root) or arguments:
        pytest.fail(
            f"{MARKER}: {name or repr(what)} cannot be called in another process. Give it a function "
            f"without arguments that stands at the top of a file below {root}, or the path of a script.",
            pytrace=False,
        )
    here = file.relative_to(root)
    return ("-m", "diagnose.gate.call", here.as_posix(), _module(here, what.__module__), name)


def _module(file: Path, name: str) -> str:
    """Returns the module that a file is to who imported it, where that agrees with the file's path."""
    parts = file.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    wanted = tuple(name.split("."))
    return name if parts[-len(wanted) :] == wanted else parts[-1]
