"""Which fault slow loading by the training thread is, and what cures it."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.core.host import HostStats
from diagnose.core.input import OwnLoading
from diagnose.rules._engine import diagnosed
from diagnose.rules._serial_examples import ON_ONE_CPU, loading, pieces, prepared


def found(own: OwnLoading | None, wait_ms: float = 40, **parts: Any) -> list[str]:
    return [finding.rule for finding in diagnosed(loading(wait_ms, own=own, **parts)).findings]


def test_the_cause_of_slow_loading_is_named_where_workers_would_not_cure_it():
    assert found(pieces()) == ["slow-storage"]
    assert found(prepared()) == ["repeated-preparation"]
    assert found(pieces(repeated=4)) == ["slow-storage"], "files that are read anew in each epoch"
    assert found(pieces(reading_share=0.3, repeated=4)) == ["repeated-preparation"]
    for own in (prepared(repeated=0), prepared(repeated=3, varied=1), None):
        assert found(own) == ["serial-loading"], "augmentation, or one epoch"


def test_what_is_made_of_a_file_while_it_is_open_is_not_reading_it():
    photographs = {"reads": 96.0}
    texts = {"reads": 288.0, "read_bytes": 2.1e6}
    for own in (photographs, texts):
        assert found(pieces(**own)) == ["serial-loading"]
        assert found(pieces(**own, repeated=4)) == ["repeated-preparation"]
    assert found(pieces(reads=None, repeated=4)) == ["serial-loading"], "nobody knows"


def test_calls_that_only_fill_a_buffer_are_no_files():
    (one,) = diagnosed(loading(40, own=pieces(reads=1088.0, read_bytes=8.4e6))).findings
    (many,) = diagnosed(loading(40, own=pieces())).findings
    assert one.rule == many.rule == "slow-storage"
    assert one.fix.startswith("Read only what the sample needs")
    assert many.fix.startswith("Put the samples into few large files")


def test_samples_that_are_handed_out_as_they_are_were_prepared_before():
    for own in (prepared(reads=64.0, read_bytes=40e6), prepared(made_bytes=80e6)):
        assert found(own) == ["serial-loading"]


@pytest.mark.parametrize("own", [pieces(), prepared()])
def test_a_dataset_that_keeps_what_it_has_made_is_not_told_to(own: OwnLoading):
    assert found(own, stats={"late_wait_ns": 1e6}) == ["serial-loading"]


@pytest.mark.parametrize("own", [pieces(), prepared()])
def test_workers_that_have_a_cpu_are_the_cure_of_slow_loading(own: OwnLoading):
    assert found(own, host=ON_ONE_CPU) == ["serial-loading"]


@pytest.mark.parametrize(("own", "name"), [(pieces(), "slow-storage"), (prepared(), "serial-loading")])
def test_loading_that_waits_is_hidden_by_workers_and_where_it_reads_the_storage_is_slow(
    own: OwnLoading, name: str
):
    waits = HostStats(cpus=2, process_cpus=0.5, on_cpu_share=0.4, runnable_share=0.01, num_threads=2)
    assert found(own, 60, host=waits) == [name]


@pytest.mark.parametrize("own", [pieces(), prepared()])
def test_the_cause_offers_workers_too(own: OwnLoading):
    (cause,) = diagnosed(loading(60, own=own)).findings
    (alone,) = diagnosed(loading(60)).findings
    assert alone.rule == "serial-loading"
    assert set(cause.actions) == set(alone.actions)
    assert dict(cause.won_ns) == dict(alone.won_ns)
    assert "Or give the DataLoader 2 workers: that wins about 50 % of the wait." in cause.fix
    assert "workers" not in diagnosed(loading(40, own=own)).findings[0].fix, "one would win nothing"


def test_an_iterator_begun_in_each_step_is_kept_before_its_samples_are():
    assert found(prepared(), loader={"epochs": 501, "dataset_length": 640}) == ["serial-loading"]


def test_what_the_training_thread_does_is_asked_for_where_it_loads_and_else_what_workers_do():
    abstained = {each.rule: each.missing for each in diagnosed(loading(40)).abstained}
    assert abstained["slow-storage"] == "input.own.reading_share"
    assert abstained["repeated-preparation"] == "input.own"
    untold = diagnosed(loading(40, own=pieces(reads=None))).abstained
    assert ("slow-storage", "input.own.reads") in {(each.rule, each.missing) for each in untold}
    cured = {each.rule for each in diagnosed(loading(40, host=ON_ONE_CPU)).abstained}
    assert not cured & {"slow-storage", "repeated-preparation"}, "nobody asks"
