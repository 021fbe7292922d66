"""Whatever of ours fails while a script is tuned, and whatever of its own: it trains as it does alone."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, currently_in_test_context, event, given, note, settings
from hypothesis import strategies as st

from diagnose.actions import _loader_switch
from diagnose.core.trial import Safety
from diagnose.tuner.paired import Verdict
from tests import running
from tests.chaos import (
    ACTIONS,
    OF_AN_ACTION,
    OF_THE_PROCESS,
    Fault,
    Injected,
    run_tuned,
)
from tests.loops import children_end
from tests.mixing import mostly_extended
from tests.running import DIAGNOSE, PLAIN, write
from tests.short_script import STEPS, Ending, Script, run

pytest_plugins = ("tests.compiled",)
pytestmark = pytest.mark.usefixtures("fresh_graphs")

WITH_WORKERS = ("loader-prefetch", "persistent-workers")
WITHOUT_WORKERS = (
    "activation-checkpointing",
    "autocast-bf16",
    "batch-growth",
    "channels-last",
    "dataset-cache",
    "fused-optimizer",
    "gc-freeze",
    "gradient-accumulation",
    "keep-freed-memory",
    "loader-workers",
    "loader-workers-reseeded",
    "micro-batching",
    "optimizer-in-backward",
    "regional-compile",
    "set-threads",
)
WITH_NOISE = ("fork-continuation",)
"""What serves samples that are random."""

CALLS_OF_HOOKS = 3000
"""About so many calls our hooks make while the script runs."""


@functools.cache
def alone(script: Script) -> Ending:
    return run(script)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One tuned run: see `run_tuned`."""

    script: Script
    names: list[str]
    fault: Fault = field(default_factory=Fault)
    verdicts: list[Verdict] = field(default_factory=lambda: [Verdict.FASTER])
    stays: bool = True


def tuned(case: Case) -> Ending:
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        return run_tuned(case.script, case.names, case.fault, case.verdicts, case.stays, Path(folder))


def assert_unharmed(case: Case) -> Ending:
    """The script gets what it gets alone, and nothing is left of us."""
    expected, ending = alone(case.script), tuned(case)
    if currently_in_test_context():
        event(f"{case.fault.where or 'memory'}: {case.fault.happened}")
        note(f"{case}: {[each for each in ending.told if each[0] in ('trial', 'tuning_error', 'dropped')]}")
    assert repr(ending.error) == repr(expected.error)
    assert ending.samples == expected.samples
    assert ending.left == expected.left
    assert ending.left_in_the_job == [{}, [], []]
    assert children_end()
    safeties = {ACTIONS[name].safety for name in case.names}
    if safeties == {Safety.EXACT}:
        assert torch.equal(ending.random, expected.random)
        assert all(map(torch.equal, ending.weights, expected.weights))
    elif safeties <= {Safety.EXACT, Safety.ROUNDING}:
        torch.testing.assert_close(ending.weights, expected.weights, rtol=1e-3, atol=1e-4)
    assert all(bool(each.isfinite().all()) for each in ending.weights)
    ours = [detail["error"] for kind, detail in ending.told if kind == "tuning_error"]
    assert [each for each in [*ours, *ending.notes] if "injected" not in each] == []
    return ending


USUAL = (
    "dataset-cache",
    "fused-optimizer",
    "loader-workers",
    "micro-batching",
    "set-threads",
)


@pytest.mark.parametrize(
    "name", mostly_extended({name: name for name in (*WITHOUT_WORKERS, *WITH_WORKERS, *WITH_NOISE)}, *USUAL)
)
def test_each_action_is_tried_and_kept_and_undone(name: str) -> None:
    script = Script(num_workers=int(name in WITH_WORKERS), noisy=name in WITH_NOISE)
    ending = assert_unharmed(Case(script=script, names=[name]))
    (trial,) = [detail for kind, detail in ending.told if kind == "trial"]
    assert (trial["action"], trial["outcome"]) == (name, "kept"), trial["reason"]


ERRORS = st.sampled_from([Injected, RuntimeError, OSError, torch.OutOfMemoryError])
CALLBACKS = st.sampled_from([*OF_AN_ACTION, *OF_THE_PROCESS])
FAULTS = st.one_of(
    st.builds(Fault, where=CALLBACKS, nth=st.integers(0, 6), error=ERRORS),
    st.builds(Fault, where=st.just("hook"), nth=st.integers(0, CALLS_OF_HOOKS), error=ERRORS),
)
OUT_OF_MEMORY = {
    "short_in": st.sampled_from(["forward", "backward", "step"]),
    "short_at": st.integers(0, STEPS - 1),
    "survives": st.booleans(),
}


def cases(num_workers: int, **of_the_script: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    """Up to three actions on a script; something of ours fails, unless the script has its own troubles."""
    names = (*WITH_WORKERS, "gc-freeze", "loader-workers") if num_workers else WITHOUT_WORKERS
    if of_the_script:  # with fewer, larger batches memory would run out elsewhere, or not at all
        names = tuple(name for name in names if name != "batch-growth")
    script = st.builds(Script, num_workers=st.just(num_workers), norm=st.booleans(), **of_the_script)
    return st.builds(
        Case,
        script=script,
        names=st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True),
        fault=st.builds(Fault) if of_the_script else FAULTS,
        verdicts=st.lists(st.sampled_from(Verdict), min_size=1, max_size=3),
        stays=st.booleans(),
    )


COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
QUICK = settings(max_examples=6, derandomize=True, phases=[Phase.generate], **COMMON)
LONG = settings(max_examples=100, phases=[Phase.generate, Phase.shrink], **COMMON)


@QUICK
@given(cases(0))
def test_whatever_of_ours_fails_a_script_trains_as_it_does_alone(case: Case) -> None:
    assert_unharmed(case)


@settings(QUICK, max_examples=3)
@given(cases(0, **OUT_OF_MEMORY))
def test_a_script_whose_memory_runs_out_ends_as_it_does_alone(case: Case) -> None:
    assert_unharmed(case)


def test_tuning_that_cannot_begin_leaves_nothing() -> None:
    script = Script(num_workers=1)
    ending = assert_unharmed(Case(script=script, names=["loader-workers"], fault=Fault("told")))
    assert ending.notes


@pytest.mark.extended
def test_no_batch_is_lost_where_comparing_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def fails(one: Any, other: Any) -> bool:
        nonlocal compared
        compared += 1
        raise Injected("injected")

    monkeypatch.setattr(_loader_switch, "same", fails)
    for _ in range(5):  # on a busy machine the script's own worker may not have made what ours is asked for
        ending = assert_unharmed(Case(script=Script(num_workers=1), names=["loader-workers"]))
        if compared:
            break
    (trial,) = [detail for kind, detail in ending.told if kind == "trial"]
    assert (trial["outcome"], "injected" in trial["reason"]) == ("refused", True)


@pytest.mark.extended
@LONG
@given(cases(0))
def test_whatever_of_ours_fails_without_workers(case: Case) -> None:
    assert_unharmed(case)


@pytest.mark.extended
@settings(LONG, max_examples=40)
@given(cases(1))
def test_whatever_of_ours_fails_with_workers(case: Case) -> None:
    assert_unharmed(case)


@pytest.mark.extended
@LONG
@given(cases(0, **OUT_OF_MEMORY))
def test_wherever_memory_runs_out(case: Case) -> None:
    assert_unharmed(case)


SABOTAGED = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset

if len(sys.argv) > 2:
    from diagnose.actions.gc_freeze import GcFreeze

    def fails(self, *given):
        raise KeyError("injected")

    setattr(GcFreeze, sys.argv[2], fails)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
seen = []
for _ in range(300):
    for (rows,) in DataLoader(TensorDataset(torch.arange(32.0).view(8, 4)), batch_size=2, shuffle=True):
        seen.append(rows[:, 0].tolist())
        optimizer.zero_grad()
        model(rows).pow(2).mean().backward()
        optimizer.step()
        time.sleep(0.005)
print(seen, model.weight.tolist())
if sys.argv[1] == "memory":
    raise torch.OutOfMemoryError("CUDA out of memory")
sys.exit(3)
"""


@pytest.mark.extended
@pytest.mark.parametrize("ends, sabotaged", [("exit", "apply"), ("exit", "state"), ("memory", "")])
def test_the_exit_code_and_the_output_are_the_scripts(ends: str, sabotaged: str, tmp_path: Path) -> None:
    write(tmp_path / "job.py", SABOTAGED)
    arguments = [ends, *filter(None, [sabotaged])]
    plain = running.run(*PLAIN, "job.py", *arguments, cwd=tmp_path)
    ours = running.run(*DIAGNOSE, "--tune", "--only", "gc-freeze", "job.py", *arguments, cwd=tmp_path)
    assert (ours.code, ours.stdout) == (plain.code, plain.stdout)
    assert ours.code == (3 if ends == "exit" else 1)
