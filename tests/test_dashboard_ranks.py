"""Who is late, on the page of ranks: bin by bin what the report says of the whole run."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dash._utils import to_json
from diagnose.dashboards._look_ranks import MAX_CELLS, MAX_ROWS, map_of, range_of
from diagnose.dashboards._snapshot import Lateness, RankBins, Snapshot
from diagnose.dashboards.ranks import Ranks, _headline

from diagnose.analysis.lateness import behind, latest, straggler
from diagnose.analysis.profile import load_profile
from diagnose.core.ledger import COLUMNS, COUNTS, SLOT_OF
from diagnose.core.liveness import Liveness, State
from diagnose.core.phases import Phase
from diagnose.core.profile import RankProfile
from tests.following import followed, until
from tests.profiles import PROFILE
from tests.recorded import MS, manifest, record, writer

STEP_MS = 20.0
NUM_STEPS = 400


def waits_ms(rank: int, step: int) -> float:
    """Rank 1 comes too late to every other step, and early to the next; on average rank 2 waits least."""
    if step % 2:
        return {1: 0.2, 2: 3.0}.get(rank, 4.0)
    return {1: 8.0, 2: 0.2}.get(rank, 0.25)


def met(first: int, count: int, rank: int) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Steps that end with a meeting of all ranks, and the meetings."""
    rows = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    meetings = []
    for index in range(count):
        wait_ns = int(waits_ms(rank, first + index) * MS)
        end_ns = int((first + index + 1) * STEP_MS * MS)
        rows[index, 0] = end_ns
        rows[index, len(COUNTS) + SLOT_OF["communication"]] = wait_ns
        rows[index, len(COUNTS) + SLOT_OF["forward"]] = int(STEP_MS * MS) - wait_ns
        meetings.append((end_ns - MS - wait_ns, end_ns - MS))
    return [tuple(row) for row in rows.tolist()], meetings


def write_met(folder: Path, per_flush: int = 100) -> Path:
    manifest(folder)
    for rank in range(4):
        with contextlib.closing(writer(folder, rank)) as file:
            for first in range(0, NUM_STEPS, per_flush):
                rows, meetings = met(first, min(per_flush, NUM_STEPS - first), rank)
                file.add_steps(rows)
                file.add_meetings(meetings)
                file.commit()
    return folder


def of_whole_run_ns(late: Lateness) -> list[float]:
    """What the map comes to, per step."""
    width, bins = late.late.width, late.late.values_ms
    counts = np.minimum(width, NUM_STEPS - width * np.arange(bins.shape[1]))
    means: list[float] = (bins @ counts / NUM_STEPS * MS).tolist()
    return means


@pytest.mark.parametrize("per_flush", [100, 3], ids=["large", "merged since"])
def test_the_map_names_the_rank_that_the_report_names(tmp_path: Path, per_flush: int) -> None:
    folder = write_met(tmp_path / "run", per_flush=per_flush)
    ranks = load_profile(folder).ranks
    waited = {rank.rank: rank.phase_time_ns[Phase.COMMUNICATION] for rank in ranks}
    assert min(waited, key=lambda rank: waited[rank]) == 2, "on average another one waits least"
    named = straggler(ranks)
    assert named is not None and named.rank == 1
    with followed(folder) as live:
        late = until(live, lambda now: now.over).lateness
    assert late is not None and late.by_meetings
    assert of_whole_run_ns(late) == pytest.approx([rank.late_ns_per_step for rank in ranks], rel=1e-9)
    assert late.now is not None and late.now.rank == 1
    assert late.now.late_ns == pytest.approx(named.late_ns)


def test_the_map_of_a_job_that_goes_on_grows_as_if_it_had_been_read_at_its_end(tmp_path: Path) -> None:
    whole = write_met(tmp_path / "whole")
    folder = manifest(tmp_path / "run", ended_unix=None, exit_code=None, pid=os.getpid())
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(contextlib.closing(writer(folder, rank))) for rank in range(4)]
        live = stack.enter_context(followed(folder))
        for first in range(0, NUM_STEPS, 50):
            for rank, file in enumerate(files):
                if (first // 50 + rank) % 3 == 0:
                    until(live, lambda now: now.version > 0)  # some ranks tell sooner than others
                rows, meetings = met(first, 50, rank)
                file.add_steps(rows)
                file.add_meetings(meetings)
                file.commit()
        grown = until(
            live,
            lambda now: (
                now.lateness is not None
                and now.lateness.by_meetings
                and len(now.lateness.late.values_ms) == 4
                and now.lateness.late.values_ms.shape[1] * now.lateness.late.width >= NUM_STEPS
            ),
        ).lateness
    with followed(whole) as live:
        read = until(live, lambda now: now.over).lateness
    assert grown is not None and read is not None
    assert of_whole_run_ns(grown) == pytest.approx(of_whole_run_ns(read))


@pytest.mark.parametrize("ranks", [8, 2])
def test_where_no_meeting_was_measured_a_rank_is_late_by_what_it_waits_less(
    tmp_path: Path, ranks: int
) -> None:
    folder = manifest(tmp_path / "run")
    slow = ranks - 1
    usual = {"data_wait": 3.0, "forward": 10.0, "communication": 5.0}
    for rank in range(ranks):
        late = {"data_wait": 6.0, "forward": 10.0, "communication": 2.0}
        record(folder, 2000, rank=rank, slots_ms=late if rank == slow else usual)
    named = straggler(load_profile(folder).ranks)
    assert named is not None and (named.rank, named.cause) == (slow, Phase.DATA_WAIT)
    assert named.late_ns == pytest.approx(3.0 * MS, rel=0.1)
    with followed(folder) as live:
        snapshot = until(live, lambda now: now.filled_share == 1.0 and now.world_size == ranks)
    drawn = snapshot.lateness
    assert drawn is not None and not drawn.by_meetings
    assert np.nanmean(drawn.late.values_ms[slow]) == pytest.approx(3.0, abs=0.2), "the map agrees"
    assert drawn.now is not None and drawn.now.rank == slow
    assert drawn.late.values_ms.shape == drawn.communication.values_ms.shape
    assert drawn.late.values_ms.shape[0] == ranks and drawn.late.values_ms.shape[1] <= 128
    assert np.nanmean(drawn.communication.values_ms[slow]) == pytest.approx(2.0, abs=0.1)
    rate = snapshot.overview.samples_per_s[0]
    assert rate == pytest.approx(ranks * 32 / 0.018, rel=0.05), "the throughput is of all ranks together"


def test_ranks_that_are_alike_have_no_straggler(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    for rank in range(4):
        record(folder, 1000, rank=rank)
    assert straggler(load_profile(folder).ranks) is None
    with followed(folder) as live:
        snapshot = until(live, lambda now: now.filled_share == 1.0 and now.world_size == 4)
    assert snapshot.lateness is not None and snapshot.lateness.now is None


def test_of_two_ranks_one_is_late_by_all_that_the_other_waits() -> None:
    assert behind(np.array([5.0, 2.0])).tolist() == [0, 3]
    assert behind(np.array([5.0, 4.0, 3.0, 1.0])).tolist() == [0, 0, 1, 3]
    torn = behind(np.array([[5.0, np.nan], [2.0, np.nan], [np.nan, 3.0]]))
    assert np.isnan(torn[2, 0]) and torn[1, 0] == 3 and torn[2, 1] == 0


def test_ranks_that_take_turns_at_being_late_have_no_straggler() -> None:
    assert latest([0.5, 0.4], [20, 20]) is None
    assert latest([0.0, 0.0, 0.0, 0.5], [20] * 4) == 3
    assert latest([0.0, 0.0, 0.0, 0.3], [20] * 4) is None, "less than anybody would look for"
    assert latest([3.0], [20]) is None


# -- the page


def late_of(num_ranks: int) -> Lateness:
    """Rank 700 is late in the second half."""
    values = np.random.default_rng(0).lognormal(0, 0.5, (num_ranks, 128))
    if num_ranks > 700:
        values[700, 64:] += 30
    bins = RankBins(first=0, width=64, values_ms=values)
    return Lateness(ranks=tuple(range(num_ranks)), late=bins, communication=bins)


def snapshot_of(num_ranks: int) -> Snapshot:
    ranks = tuple(
        RankProfile(
            rank=rank,
            host=f"node{rank // 8}",
            phase_time_ns=PROFILE.phase_time_ns,
            late_ns_per_step=15.0 * MS if rank == 700 else 0.5 * MS,
        )
        for rank in range(num_ranks)
    )
    return Snapshot(
        version=1,
        id="run",
        liveness=Liveness(state=State.ENDED),
        num_steps=8192,
        world_size=num_ranks,
        lateness=late_of(num_ranks),
        profile=replace(PROFILE, ranks=ranks),
    )


@pytest.mark.parametrize("num_ranks", [64, 1024, 10_000])
def test_the_page_of_many_ranks_is_no_more_than_may_be_sent(num_ranks: int) -> None:
    sent = to_json(Ranks().draw(snapshot_of(num_ranks), {}))
    assert len(sent) <= 60_000


def test_of_a_thousand_ranks_the_late_one_has_a_row_of_its_own_and_every_rank_can_be_seen() -> None:
    late = late_of(1024)
    everybody = range_of({}, late.ranks)
    drawn = map_of(late, late.late, everybody, "", highest=True)
    assert len(drawn.labels) == 64 and drawn.values_ms.size <= MAX_CELLS
    assert drawn.labels[700 // 16] == "688-703"
    assert int(np.argmax(drawn.values_ms.max(axis=1))) == 700 // 16, "none is hidden by its neighbours"
    parts = everybody.parts()
    assert [part.named(late.ranks) for part in parts[:2]] == ["0-63", "64-127"]
    assert {rank for part in parts for rank in range(part.first, part.last)} == set(range(1024))
    narrow = range_of({"ranks": "640-703"}, late.ranks)
    alone = map_of(late, late.late, narrow, "", highest=True)
    assert alone.labels == () and list(alone.ranks) == list(range(640, 704))
    words = to_json(Ranks().draw(snapshot_of(1024), {}))
    assert "The latest ranks" in words and '"rank 700"' in words


@pytest.mark.parametrize(
    ("works_ms", "cause"), [(30.0, "what the loop does to its batches"), (0.0, "other")]
)
def test_the_cause_says_of_a_rank_that_works_longer_on_its_batches_what_it_does(
    works_ms: float, cause: str
) -> None:
    slow = Phase.DATA_WAIT if works_ms else Phase.OTHER
    usual = {Phase.DATA_WAIT: 10.0 * MS, Phase.FORWARD: 20.0 * MS, Phase.OTHER: 0.0}
    late = {**usual, slow: usual[slow] + 30.0 * MS}
    ranks = (
        RankProfile(rank=0, host="node", phase_time_ns=usual, late_ns_per_step=0.0),
        RankProfile(
            rank=1, host="node", phase_time_ns=late, late_ns_per_step=30.0 * MS, working_ns=works_ms * MS
        ),
    )
    snapshot = snapshot_of(2)
    assert snapshot.lateness is not None
    shown = _headline(
        replace(snapshot, profile=replace(PROFILE, ranks=ranks, ranks_comparable=True)), snapshot.lateness
    )
    assert {fact.label: fact.value for fact in shown}["cause"] == cause


@pytest.mark.parametrize("asked", ["", "a-b", "9-", "5000-6000", "7-3", "-" * 50, "²-³"])
def test_an_address_that_asks_for_no_ranks_shows_all_of_them(asked: str) -> None:
    shown = range_of({"ranks": asked}, range(100))
    assert (shown.first, shown.last) == (0, 100)
    assert shown.together == -(-100 // MAX_ROWS)
