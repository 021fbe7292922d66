"""The actions that change what the ranks of a job send each other, on real ranks."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from diagnose.actions.ddp_bucket_size import DdpBucketSize
from diagnose.actions.no_sync import NoSync
from diagnose.core.job import Job
from tests.running import PLAIN, REPOSITORY, environment
from tests.test_tuner_ranks import free_port

BUCKETS, LOOKS_FOR_UNUSED, IS_STATIC, HOOK = range(4)
"""What a reducer says of itself."""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks printed."""
    place = environment(
        WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), OMP_NUM_THREADS="1"
    )
    processes = [
        subprocess.Popen(
            [*PLAIN, "-m", "tests.scripts.ddp_actions"],
            cwd=REPOSITORY,
            env={**place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    printed = [process.communicate(timeout=100) for process in processes]
    for process, (_, stderr) in zip(processes, printed, strict=True):
        assert process.returncode == 0, stderr
    return [json.loads(stdout) for stdout, _ in printed]


@pytest.fixture
def scenarios(ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    scenarios: dict[str, dict[str, Any]] = ranks[0]["scenarios"]
    return scenarios


def test_weights_are_equal_on_all_ranks_whatever_is_switched(ranks):
    first, second = (rank["scenarios"] for rank in ranks)
    assert {name: each["ours"] for name, each in first.items()} == {
        name: each["ours"] for name, each in second.items()
    }


@pytest.mark.parametrize(
    "name",
    [
        "ddp-bucket-size",
        "ddp-bucket-size of views",
        "static-graph",
        "find-unused-off",
        "no-sync of one batch",
    ],
)
def test_between_two_ranks_the_weights_are_those_of_the_script_alone(scenarios, name):
    assert scenarios[name]["ours"] == scenarios[name]["alone"]


def test_each_reducer_got_its_new_settings(scenarios):
    def said(name: str, what: int) -> set[Any]:
        return {each[what] for each in scenarios[name]["said"]}

    assert max(said("ddp-bucket-size", BUCKETS)) >= 4, "of 4 MiB, at 1 MiB each"
    assert said("static-graph", IS_STATIC) == {True}
    assert said("static-graph", LOOKS_FOR_UNUSED) == {False}
    assert said("find-unused-off", LOOKS_FOR_UNUSED) == {False}
    assert said("ddp-bf16-hook", HOOK) == {"averaged_in_bf16"}


def test_bfloat16_changes_the_weights_a_little(scenarios):
    assert 0 < scenarios["ddp-bf16-hook"]["distance"] < 1e-3


@pytest.mark.parametrize("name", ["no-sync", "no-sync of unknown length"])
def test_one_average_a_step_gives_the_same_weights_but_for_rounding(scenarios, name):
    assert 0 < scenarios[name]["distance"] < 1e-6


def test_all_averages_but_the_last_of_each_step_are_left_out(scenarios):
    # Prepared at the third step, it counts three more; the seventh is short and ends the epoch. In the next
    # epoch two of three are left out in six steps, and none in the short one.
    assert scenarios["no-sync"]["not_averaged"] == 12
    # There, only the optimizer tells that the last step is short.
    assert scenarios["no-sync of unknown length"]["not_averaged"] >= 6
    assert scenarios["no-sync of one batch"]["not_averaged"] == 0


def test_what_cannot_be_changed_is_refused_in_words(ranks):
    assert ranks[0]["refusals"] == {
        "none wrapped": "no model of the loop is wrapped in DistributedDataParallel",
        "own hook": "the script has its own communication hook (allreduce_hook)",
        "half": "gradients are not all float32: torch.float16",
        "off already": "find_unused_parameters is off already",
        "static already": "the script has set static_graph itself",
        "static with own no_sync": (
            "the script leaves out averages itself, and a static graph begins with one"
        ),
        "one batch": "each step takes one batch",
        "own no_sync": "the script leaves out averages itself",
        "two models": "several models or optimizers take turns: which pass is a step's last is unclear",
        "unused": "find_unused_parameters or static_graph expect every pass to be averaged",
    }


@pytest.mark.parametrize("action", [DdpBucketSize(), NoSync()])
def test_without_a_model_the_state_is_empty_and_equal(action):
    assert action.state(Job()) == action.state(Job())
