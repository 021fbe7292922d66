"""Rules of what averaging gradients costs under DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diagnose.core.graph import Graph
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.program import Optimizer, Program
from diagnose.rules._examples import profile
from diagnose.rules.find_unused_parameters import FindUnusedParameters
from diagnose.rules.missing_no_sync import COPY_BYTES_PER_NS, COPY_NS, MissingNoSync, accumulating
from diagnose.rules.small_buckets import SmallBuckets

GRAPH = Graph(num_nodes=3000)


def test_passes_under_no_sync_reduce_nothing():
    assert Ddp(passes_per_step=8.0, synced_share=0.125).synced_passes == 1.0
    assert Ddp(passes_per_step=8.0).synced_passes == 8.0
    assert Ddp(passes_per_step=8.0, synced_share=0.0).synced_passes == 0.0
    lost = []
    for synced in (1.0, 0.125):
        ddp = Ddp(find_unused_parameters=True, has_unused=False, passes_per_step=8.0, synced_share=synced)
        program = Program(ddp=(ddp,), graph=GRAPH)
        finding = FindUnusedParameters().check(profile(step_ms=40, program=program))
        assert finding is not None
        lost.append(finding.lost_ns_per_step)
    assert lost[0] == pytest.approx(8 * lost[1])


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("DDP(net, find_unused_parameters=True, bucket_cap_mb=1)", "DDP(net, bucket_cap_mb=1)"),
        ("DDP(net, **options)", "DistributedDataParallel(model)"),
        ("", "DistributedDataParallel(model)"),
    ],
)
def test_the_scripts_own_wrapper_is_printed_without_the_option(call: str, code: str):
    ddp = Ddp(find_unused_parameters=True, has_unused=False, file="/train.py", line=7, call=call)
    found = FindUnusedParameters().check(profile(step_ms=10, program=Program(ddp=(ddp,), graph=GRAPH)))
    assert found is not None
    assert (found.code, found.file, found.line) == (code, "/train.py", 7)


def test_small_buckets_also_cost_the_cpu_that_their_reduction_takes():
    *_, crowded, few = SmallBuckets.fires_on
    for example, num in ((crowded, 40), (few, 4)):
        found = SmallBuckets().check(example)
        assert found is not None
        assert found.lost_ns[Phase.BACKWARD] == pytest.approx(0.15 * (1 - 1 / num) * example.step_time_ns)


def test_averages_that_are_not_needed_cost_what_was_waited_in_all_of_them():
    *_, waiting = MissingNoSync.fires_on
    found = MissingNoSync().check(waiting)
    assert found is not None
    hidden = pytest.approx(3 * 0.3 * 3e6)
    assert found.lost_ns == {Phase.COMMUNICATION: pytest.approx(24e6 * 3 / 4), Phase.BACKWARD: hidden}


def test_what_overlaps_the_backward_pass_is_no_part_of_the_waits_and_not_cut_off_with_them():
    """Of eight averages seven are needless: they are nine tenths of the waits, or nearly."""
    found = MissingNoSync().check(
        profile(step_ms=100, communication_ms=24, program=accumulating(8, 1.0, waited_ns=24e6))
    )
    assert found is not None
    assert found.lost_ns[Phase.COMMUNICATION] == pytest.approx(24e6 * 7 / 8)
    assert found.lost_ns[Phase.BACKWARD] == pytest.approx(7 * 0.3 * 3e6)


@pytest.mark.parametrize(("on_cuda", "part"), [(False, 1), (True, 0)])
def test_gradients_are_put_into_buckets_by_each_average(on_cuda: bool, part: int):
    program = accumulating(4, 1.0, waited_ns=24e6)
    ddp = tuple(replace(each, param_bytes=5_000_000, on_cuda=on_cuda) for each in program.ddp)
    adam = Optimizer(kind="AdamW", num_tensors=100, num_elements=1_250_000)
    found = MissingNoSync().check(
        profile(communication_ms=30, program=replace(program, ddp=ddp, optimizers=(adam,)))
    )
    assert found is not None
    into_ns = part * (100 * COPY_NS + 5e6 / COPY_BYTES_PER_NS)
    assert found.lost_ns[Phase.BACKWARD] == pytest.approx(3 * (0.3 * 3e6 + into_ns))
    assert any("into its buckets" in sentence for sentence in found.evidence) == (not on_cuda)


def test_gradients_that_are_far_fewer_than_the_parameters_cost_no_more_than_half_of_the_pass():
    program = accumulating(4, 1.0, waited_ns=24e6)
    ddp = tuple(replace(each, param_bytes=10**9) for each in program.ddp)
    job = profile(communication_ms=30, program=replace(program, ddp=ddp))
    found = MissingNoSync().check(job)
    assert found is not None
    assert found.lost_ns[Phase.BACKWARD] == pytest.approx(0.5 * job.spent_ns(Phase.BACKWARD))
