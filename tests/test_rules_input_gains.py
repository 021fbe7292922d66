"""How much the cure of a starved loop wins: by the CPUs that there are, a quota, ranks, evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Evaluating, Loader, Program
from diagnose.core.settings import Settings
from diagnose.rules import diagnosed
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from diagnose.rules._serial import serial_of
from diagnose.rules._supply import supply_of
from diagnose.rules._worker_examples import fed_by
from tests.findings import first
from tests.test_rules_input import MS


def test_more_workers_win_no_more_than_the_cpus_allow():
    wide = supply_of(fed_by(data_wait_ms=50, fetch_ms=100, send_ms=0, num_workers=1, cpus=8))
    narrow = supply_of(fed_by(data_wait_ms=50, fetch_ms=100, send_ms=0, num_workers=1, cpus=2))
    assert wide is not None and narrow is not None
    assert wide.won_ns(num_workers=4) == 50 * MS
    # 100 ms of the process's own and 95 ms of a worker's CPU time are shared by two CPUs.
    assert narrow.won_ns(num_workers=4) == pytest.approx((100 - 97.5) * MS)


def test_a_startup_is_charged_without_the_first_batch_that_persistent_workers_make_too():
    run = fed_by(
        data_wait_ms=12,
        fetch_ms=100,
        send_ms=0,
        loader={"persistent_workers": False},
        stats={"epoch_starts": 20, "epoch_start_ns": 10 * MS, "steady_wait_ns": 2 * MS},
    )
    # Twenty beginnings in 500 steps, of which 100 ms each are the making of a batch.
    assert first(diagnosed(run)).lost_ns == {Phase.DATA_WAIT: pytest.approx(6 * MS)}


def test_a_startup_is_also_charged_with_what_the_step_after_it_computes_longer():
    run = fed_by(
        data_wait_ms=12,
        fetch_ms=10,
        loader={"persistent_workers": False, "construct_ns": 80e6},
        stats={
            "epoch_starts": 20,
            "epoch_start_ns": 10 * MS,
            "epoch_start_compute_ns": 3 * MS,
            "steady_wait_ns": 2 * MS,
        },
    )
    found = first(diagnosed(run))
    assert found.rule == "worker-startup"
    assert sum(ns for phase, ns in found.lost_ns.items() if phase is not Phase.DATA_WAIT) == pytest.approx(
        3 * MS
    )
    assert any("computed 75.0 ms longer" in words for words in found.evidence), found.evidence


def test_a_worker_beside_a_thread_of_torchs_on_each_cpu_wins_nothing_and_two_share_the_loading():
    def found(wait_ms: float, num_threads: int) -> Finding:
        host = HostStats(
            cpus=2, process_cpus=1.0, on_cpu_share=0.98, runnable_share=0.01, num_threads=num_threads
        )
        program = Program(loaders=(Loader(num_workers=0, batch_size=32),))
        waits = InputStats(steady_wait_ns=wait_ms * MS)
        return first(
            diagnosed(profile(step_ms=100, data_wait_ms=wait_ms, host=host, program=program, input=waits))
        )

    alone, crowded = found(10, num_threads=1), found(10, num_threads=2)
    assert alone.won_ns["loader-workers"] > 9 * MS
    assert crowded.won_ns["loader-workers"] == pytest.approx(4 * MS), "what a trial is worth"
    assert "if that helps" in crowded.fix and "if that helps" not in alone.fix
    assert crowded.low_ns == 0
    assert alone.fix_won_ns is None and crowded.fix_won_ns == pytest.approx(4 * MS), "what the fix brings"
    # Two workers load 60 ms on both CPUs in 30, while the model stands still.
    assert found(60, num_threads=2).won_ns["loader-workers"] == pytest.approx(30 * MS, rel=0.05)


def serial(load_ms: float, *, iterable: bool | None = None, step_ms: float = 100, **parts: Any) -> Profile:
    """A loop whose training thread loads."""
    program = Program(
        loaders=(Loader(num_workers=0, batch_size=32, iterable=iterable, call="DataLoader(rows)"),)
    )
    waits = InputStats(steady_wait_ns=load_ms * MS)
    return profile(step_ms=step_ms, data_wait_ms=load_ms, program=program, input=waits, **parts)


@pytest.mark.parametrize("limit", [{"cpus": 1, "machine_cpus": 64}, {"cpus": 64, "quota_cpus": 1.0}])
def test_a_quota_bounds_what_workers_win_as_a_binding_does(limit: dict[str, Any]):
    host = HostStats(**limit, process_cpus=0.99, on_cpu_share=0.98, runnable_share=0.01, num_threads=1)
    found = first(diagnosed(serial(60, host=host)))
    assert found.rule == "serial-loading"
    assert found.summary.startswith("The training thread loads its own batches: 60 %")
    assert "Give the DataLoader 1 worker, if that helps: the one CPU is in use already" in found.fix
    gain = found.gain(100 * MS)
    assert gain.low == 1 and gain.speedup < 1.05 and gain.high < 1.06


def test_a_quota_bounds_how_many_workers_are_asked_for():
    asked = []
    for quota in (None, 4.5):
        host = HostStats(cpus=64, process_cpus=1.0, quota_cpus=quota)
        supply = supply_of(fed_by(data_wait_ms=80, fetch_ms=200, num_workers=2, host=host))
        assert supply is not None
        asked.append(supply.enough_workers())
    assert asked == [13, 4]


def test_ranks_of_one_machine_share_its_cpus():
    def found(ranks: int) -> Finding:
        run = fed_by(data_wait_ms=50, fetch_ms=200, cpus=8, settings=Settings(local_processes=ranks))
        return first(diagnosed(run))

    assert found(1).fix == "Give the DataLoader 6 workers instead of 2."
    assert found(2).fix.startswith(
        "Give the DataLoader 4 workers instead of 2. The loop would still wait 22.5 ms"
    )
    assert found(4).rule == "slow-transform"
    assert any("There are 2 CPUs for the process" in words for words in found(4).evidence)


def test_workers_hide_nothing_behind_an_evaluation():
    host = HostStats(cpus=8, process_cpus=1.0, on_cpu_share=0.98, runnable_share=0.01)
    run = serial(30, step_ms=80, forward_ms=4, backward_ms=5, optimizer_ms=1, evaluation_ms=40, host=host)
    (found,) = (finding for finding in diagnosed(run).findings if finding.rule == "serial-loading")
    assert found.fix == "Give the DataLoader 4 workers."
    # Ten of computing hide most of what four workers load.
    assert found.won_ns["loader-workers"] == pytest.approx(29.5 * MS)
    assert found.won_ns["fork-continuation"] == pytest.approx(9.5 * MS)


def test_a_starved_loop_that_evaluates_too_is_starved():
    run = fed_by(data_wait_ms=30, fetch_ms=58, num_workers=1, evaluation_ms=40)
    assert "too-few-workers" in {finding.rule for finding in diagnosed(run).findings}


@pytest.mark.parametrize("iterable", [None, False, True])
def test_a_stream_is_divided_before_it_gets_workers_and_no_action_is_promised(iterable: bool | None):
    alone = first(diagnosed(serial(40, iterable=iterable)))
    fed = first(
        diagnosed(
            fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1, loader={"iterable": iterable, "epochs": 1})
        )
    )
    assert (alone.rule, fed.rule) == ("serial-loading", "too-few-workers")
    for found in (alone, fed):
        assert ("get_worker_info" in found.fix) == bool(iterable)
        assert bool(found.code) == bool(found.actions) == (not iterable)
        assert not (iterable and found.won_ns)


@pytest.mark.parametrize(
    ("epochs", "length", "kept"), [(501, 640, True), (25, 640, False), (501, 32, False)]
)
def test_an_iterator_begun_in_each_step_is_to_be_kept_before_workers_can_help(
    epochs: int, length: int, kept: bool
):
    example = serial(40)
    loader = replace(example.program.loaders[0], epochs=epochs, dataset_length=length)
    found = first(diagnosed(replace(example, program=Program(loaders=(loader,)))))
    assert found.rule == "serial-loading"
    assert found.fix.startswith("Keep the iterator") is kept
    assert bool(found.code or found.actions or found.won_ns) is not kept


def test_an_iterator_begun_in_each_step_throws_away_what_kept_workers_have_made():
    def found(persistent: bool, epochs: int) -> Finding:
        stats = {"epoch_starts": 500, "epoch_start_ns": 60 * MS, "steady_wait_ns": 0.0}
        loader = {"persistent_workers": persistent, "epochs": epochs, "dataset_length": 640}
        return first(diagnosed(fed_by(data_wait_ms=60, fetch_ms=20, stats=stats, loader=loader)))

    kept, started = found(True, 501), found(False, 501)
    assert (kept.rule, started.rule) == ("epoch-boundary-stall", "worker-startup")
    for each in (kept, started):
        assert each.fix.startswith("Keep the iterator") and not each.code and not each.actions
    assert found(True, 25).fix.startswith("Make epochs longer")
    assert found(False, 25).code.endswith("persistent_workers=True)")


def test_of_a_loader_made_anew_each_epoch_it_is_said_that_it_should_be_made_once():
    def found(**loader: Any) -> Finding:
        stats = {"epoch_starts": 20, "epoch_start_ns": 10 * MS, "steady_wait_ns": 2 * MS}
        return first(
            diagnosed(
                fed_by(data_wait_ms=12, fetch_ms=20, stats=stats, loader={"construct_ns": 80e6, **loader})
            )
        )

    kept = found(persistent_workers=False, num_objects=1, epochs=20)
    assert (kept.rule, kept.actions) == ("worker-startup", ("persistent-workers",))
    for persistent in (False, True):
        anew = found(persistent_workers=persistent, num_objects=20, epochs=20)
        assert (anew.rule, anew.actions, anew.code) == ("worker-startup", (), "")
        assert anew.fix.startswith("Build the DataLoader once, before the first epoch")
        assert "A DataLoader was made for each of 20 epochs." in anew.evidence


def test_a_trainer_that_makes_a_loader_for_each_evaluation_keeps_one_if_its_workers_persist():
    loader = Loader(num_workers=2, epochs=20, num_objects=20)
    evaluating = (Evaluating(loader=loader, starts=20, start_ns=6 * MS),)
    of_trainer = replace(at("trainer.train()", 0.9), via="transformers/trainer.py:2520 Trainer.train")
    for where, fix in (((), "Build the DataLoader once"), ((of_trainer,), "Keep the workers")):
        run = profile(evaluation_ms=8, program=Program(evaluating=evaluating), where=where)
        found = first(diagnosed(run))
        assert (found.rule, found.fix.startswith(fix)) == ("worker-startup", True)
        assert bool(where) is ("TrainingArguments(" in found.code)


def test_a_short_line_beside_samples_that_sleep_is_not_taken_to_wait_itself():
    slept = profile(
        step_ms=8,
        data_wait_ms=5.4,
        program=Program(loaders=(Loader(num_workers=0, file="/home/me/train.py", line=31),)),
        input=InputStats(fetch_ns=4.9 * MS, collate_ns=0.2 * MS, steady_wait_ns=5.1 * MS),
        host=HostStats(
            cpus=2, num_threads=2, on_cpu_share=0.44, runnable_share=0.01, process_cpus=0.47, machine_cpus=2
        ),
    )
    line = replace(at("optimizer.step()", 0.13, phase=Phase.OPTIMIZER), off_cpu=0.95)
    assert serial_of(replace(slept, where=(line,))) == serial_of(slept)
    serial = serial_of(slept)
    assert serial is not None and serial.waits
