"""Rules of the input pipeline together: which name a starved loop gets, its size, and the call to paste."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.input import InputStats, Reading
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.core.settings import Settings
from diagnose.rules import diagnosed
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from diagnose.rules._supply import supply_of
from diagnose.rules._worker_examples import A_CPU_IDLE, fed_by
from diagnose.rules.slow_collate import SlowCollate
from tests.findings import INPUT, RULES, first

MS = 1e6
COPIES = (
    "degraded-link",
    "device-to-host-copies",
    "pageable-copies",
    "repeated-upload",
    "saturated-link",
)
EXAMPLES = [
    pytest.param(name, example, id=f"{name}-{index}")
    for name in (*INPUT, *COPIES)
    for index, example in enumerate(RULES[name].fires_on)
]


# -- which name


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_of_all_rules_the_most_exact_one_names_the_fault(name: str, example: Profile):
    assert [finding.rule for finding in diagnosed(example).findings] == [name]


def test_a_wait_that_is_half_collate_has_one_name_not_two():
    run = profile(
        data_wait_ms=40,
        program=Program(loaders=(Loader(num_workers=0),)),
        input=InputStats(
            fetch_ns=18 * MS, collate_ns=22 * MS, steady_wait_ns=40 * MS, batches_per_step=1.0
        ),
    )
    assert [finding.rule for finding in diagnosed(run).findings] == ["slow-collate"]


@pytest.mark.parametrize(
    ("cpus", "cpu_share", "name"),
    [
        (8, 0.95, "too-few-workers"),
        (8, 0.05, "too-few-workers"),
        (2, 0.95, "slow-transform"),
        (2, 0.05, "slow-storage"),
    ],
)
def test_workers_are_asked_for_only_where_there_are_cpus_for_them(cpus: int, cpu_share: float, name: str):
    run = fed_by(data_wait_ms=50, fetch_ms=200, cpus=cpus, workers={"cpu_share": cpu_share})
    assert first(diagnosed(run)).rule == name


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("cpus", "name"), [(16, "too-few-workers"), (2, "slow-transform")])
def test_workers_that_finish_together_leave_batches_waiting_and_are_behind_all_the_same(
    num_workers: int, cpus: int, name: str
):
    """The loop waits for all of them, and meets what the others made in the steps after."""

    def run(ready: float) -> Profile:
        return fed_by(
            data_wait_ms=50,
            fetch_ms=96 * num_workers,
            num_workers=num_workers,
            cpus=cpus,
            workers={"ready_batches": ready},
        )

    assert first(diagnosed(run((num_workers - 1) / 2))).rule == name
    full = diagnosed(run(1.4 * num_workers))  # of the two for each that are prepared ahead
    assert not {finding.rule for finding in full.findings} & set(INPUT)


def test_a_loop_whose_queue_is_full_is_not_starved():
    run = fed_by(data_wait_ms=50, fetch_ms=190, workers={"ready_batches": 3.0})
    assert not {finding.rule for finding in diagnosed(run).findings} & set(INPUT)


def test_what_unpacking_leaves_to_the_collector_belongs_to_the_transfer():
    def ran(pieces: int, collected_share: float) -> Profile:
        return fed_by(
            data_wait_ms=10,
            gc_ms=14,
            fetch_ms=20,
            send_ms=60,
            workers={"ready_batches": 2.6, "pieces": pieces},
            stats={"collected_share": collected_share},
        )

    of_it, not_of_it = diagnosed(ran(400, 0.9)), diagnosed(ran(400, 0.1))
    assert [finding.rule for finding in of_it.findings] == ["worker-transfer"]
    assert first(of_it).lost_ns == {Phase.DATA_WAIT: 10 * MS, Phase.GC: pytest.approx(12.6 * MS)}
    assert [finding.rule for finding in not_of_it.findings] == ["gc-pauses", "worker-transfer"]
    assert first(diagnosed(ran(4, 0.9))).rule == "gc-pauses", "a few tensors are no objects to walk"


@pytest.mark.parametrize(("transform_share", "name"), [(0.2, "too-few-workers"), (0.7, "slow-transform")])
@pytest.mark.parametrize("fetch_ms", [70, 100, 150, 300])
def test_where_the_cpus_let_workers_win_half_the_transforms_part_gives_the_name(
    fetch_ms: float, transform_share: float, name: str
):
    """One worker beside a loop that computes 50 ms, on two CPUs: whatever a batch costs it."""
    step_ms = fetch_ms + 0.1
    run = fed_by(
        step_ms=step_ms,
        data_wait_ms=step_ms - 50,
        fetch_ms=fetch_ms,
        num_workers=1,
        cpus=2,
        host=HostStats(cpus=2, process_cpus=50 / step_ms),
        workers={"transform_share": transform_share},
    )
    found = first(diagnosed(run))
    assert [finding.rule for finding in diagnosed(run).findings] == [name]
    assert "2 workers instead of 1" in found.fix, "the other remedy has its word, too"
    assert found.actions == ("loader-workers", "loader-workers-reseeded"), "and is tried"
    assert "make preparing a sample cheaper" in found.fix.lower()


READ_OFTEN = Reading(opens=2080.0, samples=32.0, read_bytes=30e6, made_bytes=25e6, share=0.8)


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        ({"transform_share": 0.7}, "slow-transform"),
        ({"repeated": 4}, "repeated-preparation"),
        ({"reading": READ_OFTEN}, "slow-storage"),
    ],
)
def test_who_blames_the_samples_leads_to_more_workers_too_where_they_win_a_part(
    figures: dict[str, Any], name: str
):
    idle = fed_by(data_wait_ms=50, fetch_ms=100, send_ms=0, **A_CPU_IDLE, workers=figures)
    found = first(diagnosed(idle))
    assert found.rule == name
    assert found.lost_ns == {Phase.DATA_WAIT: 50 * MS}
    assert found.won_ns == dict.fromkeys(
        ("loader-workers", "loader-workers-reseeded"), pytest.approx(27.5 * MS)
    )
    assert found.gain(100 * MS, "loader-workers").speedup == pytest.approx(100 / 72.5)
    assert "Or give the DataLoader 2 workers instead of 1: that wins 55 % of the wait." in found.fix
    taken = fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers=figures)
    found = first(diagnosed(taken))
    assert found.rule == name
    assert not found.actions and not found.won_ns and "Or give" not in found.fix
    stream = first(diagnosed(replace(idle, program=dividing(idle))))
    assert not stream.actions and "Or, if the stream can be divided" in stream.fix


def dividing(run: Profile) -> Program:
    return Program(loaders=tuple(replace(each, iterable=True) for each in run.program.loaders))


def test_what_more_workers_win_where_there_is_no_cpu_for_them_is_nothing():
    found = first(diagnosed(fed_by(data_wait_ms=50, fetch_ms=200, cpus=2)))
    assert "There are 2 CPUs for the process: more workers would win nothing." in found.evidence
    assert found.summary.startswith("Preparing samples takes the CPUs there are, and still 50 %")
    figures = {"transform_share": 0.7}
    found = first(diagnosed(fed_by(data_wait_ms=50, fetch_ms=100, **A_CPU_IDLE, workers=figures)))
    assert found.summary.startswith("Transforms of the samples keep the workers behind: 50 % of each step")


def test_workers_that_are_told_of_to_win_a_part_leave_the_rest_of_the_wait_unclaimed():
    found = first(diagnosed(fed_by(data_wait_ms=50, fetch_ms=100, send_ms=0, **A_CPU_IDLE)))
    # 50 ms of the loop's own and 95 ms of the worker's CPU time on two CPUs.
    assert found.lost_ns == {Phase.DATA_WAIT: pytest.approx(27.5 * MS)}
    assert "The loop would still wait 22.5 ms" in found.fix


# -- how much


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


# -- what to paste


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (
            "bursty-prefetch",
            "DataLoader(train_set, batch_size=32, shuffle=True, num_workers=2, prefetch_factor=4)",
        ),
        (
            "slow-samples",
            "DataLoader(train_set, batch_size=32, shuffle=True, num_workers=2, in_order=False)",
        ),
        ("too-few-workers", "DataLoader(train_set, batch_size=32, shuffle=True, num_workers=3)"),
        ("too-many-workers", "DataLoader(train_set, batch_size=32, shuffle=True, num_workers=2)"),
        (
            "worker-startup",
            "DataLoader(train_set, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)",
        ),
    ],
)
def test_the_fix_is_the_scripts_own_call_changed(name: str, code: str):
    finding = first(diagnosed(RULES[name].fires_on[0]))
    assert finding.code == code
    assert (finding.file, finding.line) == ("/home/me/train.py", 31)


def test_workers_that_have_no_cpu_of_their_own_are_expected_to_win_less_than_a_cache():
    loading = profile(
        step_ms=14,
        data_wait_ms=10,
        program=Program(loaders=(Loader(num_workers=0, batch_size=16),)),
        input=InputStats(fetch_ns=9 * MS, collate_ns=1 * MS, steady_wait_ns=10 * MS),
        host=HostStats(cpus=2, process_cpus=1.3),
    )
    finding = first(diagnosed(loading))
    assert finding.rule == "serial-loading"
    # 1.3 CPUs of 14 ms are 9.1 ms on two; with a batch that is there already the rest of the step is left.
    assert finding.gain(14 * MS, "loader-workers").speedup == pytest.approx(14 / 9.6, rel=0.01)
    assert finding.gain(14 * MS, "dataset-cache").speedup == pytest.approx(14 / 4.5, rel=0.01)
    assert finding.fix.endswith("workers: about 1.5x, as loading and the model share 2 CPUs.")


def test_workers_that_only_wait_may_be_more_than_the_cpus():
    waiting = profile(
        step_ms=24,
        data_wait_ms=20,
        program=Program(loaders=(Loader(num_workers=0, batch_size=16),)),
        input=InputStats(fetch_ns=20 * MS, collate_ns=0.1 * MS, steady_wait_ns=20 * MS),
        host=HostStats(cpus=2, process_cpus=0.3, on_cpu_share=0.17, runnable_share=0.01),
    )
    finding = first(diagnosed(waiting))
    assert finding.fix == "Give the DataLoader 7 workers."
    assert finding.gain(24 * MS, "loader-workers").speedup == pytest.approx(24 / 4.5, rel=0.01)


def test_of_a_collate_function_whose_lines_were_not_seen_the_first_is_to_blame():
    made = {"num_workers": 0, "file": "/home/me/train.py", "line": 31, "collate": "Pad"}
    stats = InputStats(fetch_ns=5 * MS, collate_ns=35 * MS, steady_wait_ns=40 * MS, batches_per_step=1.0)
    for own, place in (
        ({"collate_file": "/home/me/pad.py", "collate_line": 7}, ("/home/me/pad.py", 7)),
        ({}, ("/home/me/train.py", 31)),
    ):
        program = Program(loaders=(Loader(**made, **own),))
        finding = SlowCollate().check(profile(data_wait_ms=40, program=program, input=stats))
        assert finding is not None and (finding.file, finding.line) == place


def test_work_of_the_loop_on_what_workers_deliver_is_told_with_what_they_could_take_over():
    tokenized = at("enc = tokenizer(batch['text'])", 0.3, phase=Phase.DATA_WAIT)
    given = {"where": (tokenized,), "stats": {"steady_wait_ns": MS, "epoch_start_ns": 0.0}}
    idle = first(diagnosed(fed_by(data_wait_ms=31, fetch_ms=20, num_workers=4, **given)))
    busy = first(diagnosed(fed_by(data_wait_ms=31, fetch_ms=180, num_workers=2, **given)))
    assert idle.rule == busy.rule == "slow-batch-building"
    assert idle.lost_ns_per_step == pytest.approx(30 * MS)
    assert idle.low_ns > 15 * MS and busy.low_ns == 0
    assert (idle.file, idle.line) == (tokenized.file, tokenized.line)


@pytest.mark.parametrize(
    ("function", "named"),
    [("get_batch", "get_batch"), ("main", "this line"), ("<module>", "this line"), ("learn", "this line")],
)
def test_what_makes_a_batch_is_named_but_not_the_function_that_holds_the_loop(function: str, named: str):
    makes = replace(at("ids = encode(text)", 0.3, phase=Phase.DATA_WAIT), function=function)
    steps = replace(at("optimizer.step()", 0.1, phase=Phase.OPTIMIZER), function="learn")
    finding = RULES["slow-batch-building"].check(profile(data_wait_ms=31, where=(makes, steps)))
    assert finding is not None and finding.fix.startswith(f"Do what {named} does once before the loop")
