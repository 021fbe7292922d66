"""The slowest batches on the page of the input pipeline, and what it says where none were kept."""

from __future__ import annotations

from dataclasses import replace

from dash._utils import to_json
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards.input import InputPipeline

from diagnose.core.input import SlowBatch, WorkerStats
from diagnose.core.liveness import Liveness, State
from diagnose.core.program import Loader
from tests.profiles import PROFILE, WORKERS
from tests.recorded import MS


def page(workers: WorkerStats | None, length: int = 100_000) -> str:
    program = replace(
        PROFILE.program, loaders=(Loader(dataset="Pictures", num_workers=4, dataset_length=length),)
    )
    profile = replace(PROFILE, input=replace(PROFILE.input, workers=workers), program=program)
    snapshot = Snapshot(version=1, id="run", liveness=Liveness(state=State.ENDED), profile=profile)
    drawn: str = to_json(InputPipeline().draw(snapshot, {}))
    return drawn


def slow(took_ms: int, before: int, *samples: int) -> SlowBatch:
    return SlowBatch(took_ns=took_ms * MS, worker=1, before=before, step=9, num_samples=32, samples=samples)


def test_the_slowest_batches_are_named_with_what_was_in_them() -> None:
    first = slow(900, 0, 5, 6, 7)  # a worker's start
    batches = (first, slow(800, 3, *range(10, 42)), slow(700, 9, 3, 17, 4), slow(600, 12, 5, 6, 8))
    words = page(replace(WORKERS, median_ns=150.0 * MS, slowest=batches))
    named = "In more of them than chance explains: sample 17."
    assert named in words, "the first batch is slow whatever is in it"
    few = page(replace(WORKERS, median_ns=150.0 * MS, slowest=batches), length=100)
    assert "than chance explains" not in few, "of a hundred samples some are in two of three batches anyway"
    assert "10, 11, 12, 13, 14, 15 and 26 more" in words
    assert '"5.3x"' in words, "of a usual batch"


def test_where_the_training_thread_makes_its_batches_itself_the_page_says_that_none_was_timed() -> None:
    assert "here the training thread makes them" in page(None)
    assert "The slowest batches" not in page(WORKERS), "a run from before they were kept"
