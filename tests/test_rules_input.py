"""Rules of the input pipeline together: which name a starved loop gets, and the call to paste."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diagnose.core.host import HostStats
from diagnose.core.input import InputStats, Reading
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.rules import diagnosed
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from diagnose.rules._worker_examples import A_CPU_IDLE, CROWDED, fed_by
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


@pytest.mark.parametrize(
    ("name", "fetch_ms", "collate_ms", "part"),
    [("slow-collate", 40, 70, 63 / 109), ("slow-transform", 70, 40, 63 / 109)],
)
def test_what_crowds_the_model_is_charged_with_its_part_of_what_workers_compute(
    name: str, fetch_ms: float, collate_ms: float, part: float
):
    """They fetch, collate and send, and the model waits for a CPU 15 ms of its 100."""
    run = fed_by(data_wait_ms=2, fetch_ms=fetch_ms, collate_ms=collate_ms, send_ms=10, **CROWDED)
    found = RULES[name].check(run)
    assert found is not None
    assert sum(found.lost_ns.values()) == pytest.approx(15 * MS * part)


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


READ_OFTEN = Reading(opens=2080.0, reads=6240.0, samples=32.0, read_bytes=30e6, share=0.8)


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
