"""Ranks whose times do not compare: nobody is named late, and the report says why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from diagnose.analysis.profile import load_profile
from diagnose.analysis.program import exchanged_ns
from diagnose.core.profile import Profile
from diagnose.rules import diagnosed
from tests.recorded import MS, manifest, steps, writer
from tests.test_device_clock import device_rows, log_of

NUM_STEPS = 100
WAITING = {"forward": 10.0, "backward": 30.0}
LATE = {"forward": 30.0, "backward": 10.0}
"""What rank 1 spends."""

MEETING = {"forward": 10.0, "backward": 20.0, "communication": 10.2}
"""What each of two ranks spends."""

TRAINED = {"optimizers": [{"kind": "SGD", "num_tensors": 2, "num_elements": 1000}]}
"""What the hooks tell of the optimizer."""

NAMING = {"compute-straggler", "gc-straggler", "input-straggler"}


def job(
    folder: Path,
    *,
    ranks: int = 2,
    device: str = "cpu",
    by_device: Collection[int] = (),
    groups: Sequence[Sequence[int]] = (),
) -> Profile:
    """A job whose rank 1 is late. Some ranks' steps are by the device's clock, which tells the same; the
    gradients of each group are averaged."""
    run = manifest(folder)
    for rank in range(ranks):
        slots = LATE if rank == 1 else WAITING
        group = next((list(group) for group in groups if rank in group), None)
        facts = {"ddp": {"ranks": group}} if group else {}
        with contextlib.closing(writer(run, rank, world_size=ranks, device=device, facts=facts)) as file:
            file.add_steps(steps(0, NUM_STEPS, slots, spread=0))
            if rank in by_device:
                file.add_device_steps(0, device_rows(NUM_STEPS, slots))
            file.set_meta({"state": {"finished": True}})
    return diagnosed(load_profile(run))


def two_ranks(
    run: Path, facts: Mapping[str, Any], spent: Callable[[int, int], Mapping[str, float]]
) -> Profile:
    """A job of two ranks; `spent` tells what a rank takes in a step, in milliseconds by slot."""
    manifest(run)
    for rank in range(2):
        with contextlib.closing(writer(run, rank, world_size=2, facts=facts)) as file:
            for step in range(NUM_STEPS):
                file.add_steps(steps(step, 1, spent(rank, step), spread=0))
            file.set_meta({"state": {"finished": True}})
    return diagnosed(load_profile(run))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="by the host"),
        pytest.param({"device": "cuda", "by_device": (0, 1)}, id="by the device"),
        pytest.param({"groups": ((0, 1),)}, id="one group"),
    ],
)
def test_ranks_by_one_clock_and_in_one_group_are_compared(tmp_path: Path, options: dict[str, Any]) -> None:
    profile = job(tmp_path / "run", **options)
    (found,) = (each for each in profile.findings if each.rule == "compute-straggler")
    assert found.ranks == (1,)
    assert profile.ranks[1].late_ns_per_step == pytest.approx(20 * MS)
    assert profile.history is not None and profile.history.late is not None
    assert profile.notes == ()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param(
            {"device": "cuda", "by_device": (0,)},
            "the steps of some ranks are by the clock of their device, those of others by the host's",
            id="two clocks",
        ),
        pytest.param(
            {"device": "cuda"}, "the ranks train on devices, whose clock was not heard", id="launches"
        ),
        pytest.param(
            {"ranks": 4, "groups": ((0, 2), (1, 3))},
            "gradients are averaged in 2 groups of ranks",
            id="two groups",
        ),
    ],
)
def test_ranks_that_do_not_compare_are_not_named(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    profile = job(tmp_path / "run", **options)
    assert not NAMING & {each.rule for each in profile.findings}
    assert {each.rule for each in profile.abstained if each.missing == "ranks_comparable"} >= NAMING
    assert {rank.late_ns_per_step for rank in profile.ranks} == {None}
    assert profile.history is not None and profile.history.late is None
    others = [note for note in profile.notes if not note.startswith("Rates are")]
    assert others == [f"Which rank is late is not told: {why}."]


def test_ranks_of_another_axis_of_the_mesh_are_fed_no_more_samples(tmp_path: Path) -> None:
    both = job(tmp_path / "both", ranks=4, groups=((0, 1, 2, 3),))
    halved = job(tmp_path / "halved", ranks=4, groups=((0, 2), (1, 3)))
    assert both.throughput.samples_per_s is not None
    assert halved.throughput.samples_per_s == pytest.approx(both.throughput.samples_per_s / 2)
    assert any(note.startswith("Rates are of the 2 ranks") for note in halved.notes)
    assert both.notes == ()


def test_one_rank_on_a_device_whose_clock_was_not_heard_needs_no_note(tmp_path: Path) -> None:
    profile = job(tmp_path / "run", ranks=1, device="cuda")
    assert profile.notes == ()
    assert not NAMING & {each.rule for each in profile.abstained}


def test_what_a_rank_waits_for_one_other_is_told_by_the_host_alone(tmp_path: Path) -> None:
    facts = {"exchanges": {"waited_ns": 3 * MS * NUM_STEPS}}
    waits = []
    for name, exchanging, heard in (("none", {}, True), ("host", facts, False), ("device", facts, True)):
        run = manifest(tmp_path / name)
        with contextlib.closing(writer(run, device="cuda", facts=exchanging)) as file:
            file.add_steps(steps(0, NUM_STEPS, WAITING, spread=0))
            if heard:
                file.add_device_steps(0, device_rows(NUM_STEPS, WAITING))
        waits.append(exchanged_ns(log_of(run)))
    assert waits == [0.0, 3.0 * MS, None]


@pytest.mark.parametrize(
    ("times", "passes", "named"),
    [
        pytest.param(1, 1, set(), id="once"),
        pytest.param(4, 4, {"missing-no-sync"}, id="in each micro-batch"),
        pytest.param(0.1, 1, {"frequent-collectives"}, id="something else"),
        pytest.param(None, 1, {"frequent-collectives"}, id="outside of it"),
    ],
)
def test_gradients_that_the_loop_averages_itself_are_no_collectives_of_its_own(
    tmp_path: Path, times: float | None, passes: int, named: set[str]
) -> None:
    facts: dict[str, Any] = dict(TRAINED)
    if times is not None:
        facts["averaging"] = {
            "elements": 1000 * times * NUM_STEPS,
            "passes": passes * NUM_STEPS,
            "waited_ns": 10 * MS * NUM_STEPS,
        }
    profile = two_ranks(tmp_path / "run", facts, lambda *_: MEETING)
    assert {each.rule for each in profile.findings} == named
    assert profile.ranks[1].averaged_ns == (0 if times is None else 10 * MS)


@pytest.mark.parametrize(
    ("trained", "handed_on", "named"),
    [
        pytest.param(2000, 1, set(), id="a shard"),
        pytest.param(1001, 1, set(), id="half of the tensors, and nearly all numbers"),
        pytest.param(2000, 0.1, {"frequent-collectives"}, id="something else"),
        pytest.param(1000, 1, {"frequent-collectives"}, id="all of it"),
    ],
)
def test_what_each_optimizer_updates_of_its_own_is_handed_on_as_gradients_are(
    tmp_path: Path, trained: int, handed_on: float, named: set[str]
) -> None:
    fact = {
        "passes": NUM_STEPS,
        "trained": trained,
        "trained_tensors": 4 if trained > 1000 else 2,
        "waited_ns": 5 * MS * NUM_STEPS,
    }
    facts: dict[str, Any] = {
        **TRAINED,
        "averaging": {**fact, "elements": trained * NUM_STEPS},
        "handed_on": {**fact, "elements": trained * handed_on * NUM_STEPS},
    }
    profile = two_ranks(tmp_path / "run", facts, lambda *_: MEETING)
    assert {each.rule for each in profile.findings} == named
    assert profile.program.averaging is not None
    assert profile.program.averaging.times == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("times", "passes", "rounds", "named"),
    [
        pytest.param(1, 1, 1, set(), id="once"),
        pytest.param(4, 4, 1, {"missing-no-sync"}, id="in each micro-batch"),
        pytest.param(4, 4, 4, set(), id="for each of four steps"),
        pytest.param(0.1, 1, 1, set(), id="something else"),
        pytest.param(2, 1, 1, set(), id="of more than its optimizer updates"),
    ],
)
def test_gradients_that_are_averaged_inside_of_passes_are_none_of_the_loops_collectives(
    tmp_path: Path, times: float, passes: int, rounds: int, named: set[str]
) -> None:
    waited = {"waited_ns": 10 * MS * NUM_STEPS}
    facts: dict[str, Any] = {
        **TRAINED,
        "exchanges": waited,
        "averaging_inside": {
            "elements": 1000 * times * NUM_STEPS,
            "passes": passes * NUM_STEPS,
            "rounds": rounds * NUM_STEPS,
            **waited,
        },
    }
    profile = two_ranks(tmp_path / "run", facts, lambda *_: MEETING)
    assert {each.rule for each in profile.findings} == named
    are_gradients = times >= 1
    assert profile.ranks[1].averaged_ns == (10 * MS if are_gradients else 0)
    assert profile.ranks[1].exchanged_ns == (0 if are_gradients else 10 * MS)


@pytest.mark.parametrize(
    ("times", "named"),
    [
        pytest.param(1, {"frequent-collectives": 10 * MS}, id="once"),
        pytest.param(
            4, {"frequent-collectives": 10 * MS, "missing-no-sync": 3 * MS}, id="in each micro-batch"
        ),
    ],
)
def test_metrics_that_are_added_up_between_pass_and_step_are_no_gradients_that_hooks_average(
    tmp_path: Path, times: int, named: dict[str, int]
) -> None:
    facts: dict[str, Any] = {
        **TRAINED,
        "exchanges": {"waited_ns": 4 * MS * NUM_STEPS},
        "averaging": {"elements": 3 * NUM_STEPS, "passes": NUM_STEPS, "waited_ns": 10 * MS * NUM_STEPS},
        "averaging_inside": {
            "elements": 1000 * times * NUM_STEPS,
            "passes": times * NUM_STEPS,
            "rounds": NUM_STEPS,
            "waited_ns": 4 * MS * NUM_STEPS,
        },
    }
    profile = two_ranks(tmp_path / "run", facts, lambda *_: {**MEETING, "communication": 14.0})
    assert {each.rule: each.lost_ns_per_step for each in profile.findings} == pytest.approx(named)
    assert profile.ranks[1].averaged_ns == 4 * MS


AVERAGES: dict[str, Any] = {
    **TRAINED,
    "averaging": {"elements": 1000 * NUM_STEPS, "passes": NUM_STEPS, "waited_ns": 2 * MS * NUM_STEPS},
}
AVERAGES_INSIDE: dict[str, Any] = {
    **TRAINED,
    "averaging_inside": AVERAGES["averaging"],
    "exchanges": {"waited_ns": 2 * MS * NUM_STEPS},
}


@pytest.mark.parametrize("phase", ["backward", "forward", "gap_after_rest"])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("facts", [AVERAGES, AVERAGES_INSIDE])
def test_a_rank_that_the_others_wait_for_where_the_loop_averages_is_named(
    tmp_path: Path, phase: str, late: int, facts: dict[str, Any]
) -> None:
    def spent(rank: int, step: int) -> dict[str, float]:
        slots = {"forward": 10.0, "backward": 20.0, "communication": 2.0, "gap_after_rest": 1.0}
        slots[phase if rank == late else "communication"] += 5.0
        return slots

    profile = two_ranks(tmp_path / "run", facts, spent)
    (found,) = profile.findings
    assert (found.rule, found.ranks) == ("compute-straggler", (late,))
    assert found.lost_ns_per_step == pytest.approx(5 * MS)
    assert profile.ranks[late].late_ns_per_step == pytest.approx(5 * MS)
    assert profile.program.meetings is None


def test_ranks_that_take_turns_where_the_loop_averages_are_not_named(tmp_path: Path) -> None:
    def spent(rank: int, step: int) -> dict[str, float]:
        is_late = step % 2 == rank
        return {
            "forward": 10.0,
            "backward": 20.0 + 8.0 * is_late,
            "communication": 2.0 + 8.0 * (not is_late),
        }

    profile = two_ranks(tmp_path / "run", AVERAGES, spent)
    assert profile.program.gatherings is not None
    assert profile.findings == ()


@pytest.mark.parametrize(
    ("slower_ms", "pause_ms"),
    [
        pytest.param(2.0, 170.0, id="the other is slower in all steps"),
        pytest.param(0.0, 170.0, id="the other is as fast"),
    ],
)
@pytest.mark.parametrize("paused", [0, 1])
def test_a_pause_is_lost_whatever_the_other_rank_holds_up_in_other_steps(
    tmp_path: Path, paused: int, slower_ms: float, pause_ms: float
) -> None:
    def spent(rank: int, step: int) -> dict[str, float]:
        pauses = step % 25 == 7
        own = {"forward": 10.0, "backward": 20.0, "communication": 2.0}
        if rank == paused:
            own["gc"] = pause_ms * pauses
            own["communication"] += slower_ms * (not pauses)
        else:
            own["backward"] += slower_ms
            own["communication"] += (pause_ms - slower_ms) * pauses
        return own

    profile = two_ranks(tmp_path / "run", AVERAGES, spent)
    found = next(each for each in profile.findings if each.rule == "gc-straggler")
    assert found.ranks == (paused,)
    assert found.lost_ns_per_step == pytest.approx((pause_ms - slower_ms) / 25 * MS)


def test_pauses_that_nobody_waits_for_are_not_lost(tmp_path: Path) -> None:
    """A rank that pauses a little in each step, and is still the first to come."""
    pausing = {"forward": 10.0, "backward": 20.0, "gc": 3.0, "communication": 7.0}
    waited_for = {"forward": 10.0, "backward": 28.0, "communication": 2.0}
    profile = two_ranks(tmp_path / "run", AVERAGES, lambda rank, step: waited_for if rank else pausing)
    assert "gc-straggler" not in {each.rule for each in profile.findings}
