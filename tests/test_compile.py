"""`torch.compile` makes the same graphs, as often, with and without us."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from diagnose.analysis.profile import load_profile
from diagnose.core.phases import Phase
from tests.running import REPOSITORY, SCRIPTS, Ended, run

COMPILES = SCRIPTS / "compiles.py"
WAYS = (
    "module",
    "method",
    "called_before",
    "sequential_in_sequential",
    "regions",
    "graph_break",
    "function_of_the_loss",
    "whole_step",
    "optimizer_step",
    "sizes_that_change",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(sys.executable, COMPILES, cwd=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def ours(run_folder: Path) -> Ended:
    boot = REPOSITORY / "diagnose" / "launch" / "boot"
    return run(sys.executable, COMPILES, cwd=run_folder, PYTHONPATH=str(boot), DIAGNOSE_RUN=str(run_folder))


def made(ended: Ended) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    return {line.pop("way"): line for line in lines}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_graphs_breaks_and_recompilations_are_those_without_us(plain, ours, way):
    before, now = made(plain)[way], made(ours)[way]
    assert before["stats"]["unique_graphs"] >= 1
    assert now["stats"] == before["stats"], "graphs and the calls in them"
    assert now["recompiles"] == before["recompiles"]
    assert now["loss"] == before["loss"]
    assert now["compiled"] == before["compiled"], "the same functions, none of ours among them"
    # Where Dynamo gives up at a function that we have wrapped, it names a part of it: the words differ.
    assert sum(now["breaks"].values()) == sum(before["breaks"].values())
    # Frames that it looked at and skipped count in `total`.
    for kind in ("ok", "total"):
        assert abs(now["frames"].get(kind, 0) - before["frames"].get(kind, 0)) <= 1


@pytest.mark.extended
def test_full_graphs_stay_one_graph(ours):
    graphs = {way: made(ours)[way]["stats"]["unique_graphs"] for way in WAYS}
    once = ("module", "called_before", "sequential_in_sequential", "function_of_the_loss", "optimizer_step")
    assert {graphs[way] for way in once} == {1}
    assert graphs["method"] == 2, "in training and, without gradients, in evaluation"


@pytest.mark.extended
def test_compiling_says_what_it_says_without_us(plain, ours):
    def words(ended: Ended) -> list[str]:
        return [line.partition("] ")[2] for line in ended.stderr.splitlines()]

    assert (ours.code, words(ours)) == (plain.code, words(plain))


@pytest.mark.extended
def test_the_steps_of_compiled_models_have_their_phases(ours, run_folder):
    assert ours.code == 0
    profile = load_profile(run_folder)
    # An optimizer step inside a compiled function is not seen; of models trained in turn, see
    # test_steps_without_loader.
    seen = len(WAYS) - len(("whole_step", "optimizer_step"))
    assert profile.steps.count == 30 * seen - (seen - 1)
    assert profile.notes == ()
    assert profile.phase_time_ns[Phase.COMPILE] > profile.phase_time_ns[Phase.FORWARD] > 0
    assert profile.phase_time_ns[Phase.EVALUATION] > 0
    assert profile.events["compile"] >= len(WAYS), "also after torch._dynamo.reset()"


def test_beginning_and_ending_around_a_compiled_model_recompiles_nothing(tmp_path):
    ended = run(sys.executable, COMPILES, "late", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    before, during, after, steps, notes = json.loads(ended.stdout)
    assert before["stats"]["unique_graphs"] == 1
    assert before == during == after
    assert (steps, notes) == (30, [])


@pytest.mark.extended
def test_copies_of_tensors_are_calls_in_the_graph_while_they_are_measured_and_afterwards(tmp_path):
    ended = run(sys.executable, SCRIPTS / "compiles_copies.py", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    measured, looked_up, after = json.loads(ended.stdout)
    assert measured == {
        "a type": [["to"]],
        "a device": [["to"]],
        "of a weight": [["to"]],
        "to the host": [["cpu"]],
        "into another": [["copy_"]],
        "of the class": [["to", "cpu"]],
    }
    assert looked_up == measured == after


def test_a_break_at_what_dynamo_leaves_out_has_its_line():
    """Of a call that it skips by its own rules, as those of loggers, Dynamo's words name no place."""
    import logging

    import torch

    from diagnose.hooks.compiler_counters import describe

    log = logging.getLogger("compiled")

    def noisy(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        log.debug("one")
        x = x * 2
        log.debug("two")
        return x

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(noisy, backend="eager")(torch.ones(2))
    first = noisy.__code__.co_firstlineno
    breaks = describe()["breaks"]
    assert {(each["file"], each["line"]) for each in breaks} == {
        (__file__, first + 2),
        (__file__, first + 4),
    }
    assert all(each["reason"] for each in breaks)
    torch._dynamo.reset()
