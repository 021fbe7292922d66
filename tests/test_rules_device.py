"""Rules of a device's readings, on constructed ones, and of ranks with unequal work, on real runs too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diagnose.analysis.imbalance import imbalance_of
from diagnose.analysis.profile import load_profile
from diagnose.analysis.rank_summary import Window
from diagnose.analysis.reduction import reduce_logs
from diagnose.analysis.script import Script
from diagnose.core.deep_window import TOLD
from diagnose.core.graph import Graph, Work
from diagnose.core.ledger import COLUMNS
from diagnose.core.parallel import Imbalance
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.rules import diagnosed
from diagnose.rules._device import busy_ns, kernel_share
from diagnose.rules._engine import ask, built_in
from diagnose.rules._examples import GIB, card, profile
from diagnose.rules._lines import at
from diagnose.rules._phases import shared
from diagnose.rules._traps import traps
from diagnose.rules.launch_bound import ALWAYS_DRY, EXPECTED, LOW, by_events
from diagnose.rules.needless_recompute import on_device
from diagnose.store.reader import RankLog
from tests.running import recorded

RULES = built_in()


# -- a device's time as the loop's


def test_what_the_host_loses_counts_as_far_as_the_device_may_have_been_idle():
    logs = at("print(step)", 0.3, "log")
    of_host = replace(profile(device=card(), other_ms=40, where=(logs,)))
    by_events = {Phase.OTHER: 0.0, Phase.FORWARD: 30e6}
    behind = replace(of_host, device=card(idle_at_most_ns=by_events))
    level = replace(of_host, device=card(idle_at_most_ns={Phase.OTHER: 10e6}))
    rule = {"logging-io": RULES["logging-io"]}
    lost = [[each.lost_ns for each in ask(rule, each)[0]] for each in (of_host, behind, level)]
    assert lost == [[{Phase.OTHER: pytest.approx(30e6)}], [], [{Phase.OTHER: 10e6}]]
    by_host = replace(behind, run=replace(behind.run, device="cpu"))
    assert ask(rule, by_host)[0], "no device, no doubt"


def test_what_the_host_loses_is_no_more_than_the_time_without_a_kernel():
    """Events cannot tell a host that waits for the device inside of a phase from one that launches late."""
    waits = at("if x.abs().max().item() > 1e4:", 0.28, "sync", phase=Phase.FORWARD)
    rule, lost = {"host-sync": RULES["host-sync"]}, []
    for share, others in ((0.985, 0), (0.9, 0), (0.5, 0), (None, 0), (0.985, 1), (0.985, None)):
        readings = {"utilisation_share": share, "other_processes": others}
        device = card(idle_at_most_ns={Phase.FORWARD: 29e6}, **readings)
        findings = ask(rule, profile(device=device, where=(waits,)))[0]
        lost.append(sum(each.lost_ns_per_step for each in findings))
    assert lost == [0, *(pytest.approx(ms * 1e6) for ms in (10, 28, 28, 28, 28))]


def test_launches_are_waited_for_between_what_events_and_the_driver_allow():
    """Half of the time no kernel ran: of that, gaps may have had 4 of 95 ms."""
    finding = ask({"launch-bound": RULES["launch-bound"]}, by_events(600, ALWAYS_DRY))[0][0]
    assert sum(finding.lost_ns.values()) == pytest.approx(EXPECTED * 50e6 * 91 / 95)
    assert finding.low_ns == pytest.approx(LOW * 46e6)
    assert finding.high_ns == pytest.approx(50e6)


@pytest.mark.parametrize("missing", ["utilisation_share", "idle_at_most_ns", "graph"])
def test_what_launches_leave_is_asked_of_a_deep_window_where_events_and_driver_do_not_tell(missing: str):
    heard = by_events(600, ALWAYS_DRY)
    if missing == "graph":  # of a compiled model none is seen
        unheard = replace(heard, program=replace(heard.program, graph=None))
    else:
        unheard = replace(heard, device=replace(heard.device, **{missing: None}))
    (abstention,) = ask({"launch-bound": RULES["launch-bound"]}, unheard)[1]
    assert abstention.missing in TOLD


def test_a_devices_time_is_never_more_than_the_phases_that_wait_for_it():
    fed_slowly = profile(data_wait_ms=60, device=card(busy_share=0.95))
    assert busy_ns(fed_slowly) == pytest.approx(40e6)
    lost = shared(fed_slowly, 90e6)
    assert Phase.DATA_WAIT not in lost
    assert sum(lost.values()) == pytest.approx(40e6)


def test_the_share_of_products_is_the_measured_one_where_there_is_one():
    graph = Graph(num_nodes=10, total=Work(num_ops=4, flops=8e12, num_bytes=1e9))
    half = Work(num_ops=1, flops=4e12)
    assert kernel_share(profile(device=card(matmul_share=0.6)), graph, half) == pytest.approx(0.3)
    # 0.586 s of arithmetic, 1.7 ms of memory
    assert kernel_share(profile(device=card()), graph, graph.total) == pytest.approx(0.997, abs=1e-3)
    assert kernel_share(profile(device="cuda"), graph, half) is None


def test_a_device_without_readings_makes_rules_abstain_and_none_fire():
    findings, abstained = ask(RULES, profile(device="cuda"))
    assert findings == ()
    missing = {one.rule: one.missing for one in abstained}
    assert missing["throttled-device"] == "device.throttle_reasons"
    assert missing["launch-bound"] == "device.launch_bound_ns"
    assert missing["allocator-retries"] == "device.alloc_retries"


@pytest.mark.parametrize("name", ["allocator-retries", "memory-fragmentation"])
def test_retries_are_counted_in_the_steps_that_were_looked_at(name: str):
    rule = RULES[name]
    looked = rule.fires_on[0]
    retries = looked.device.alloc_retries
    assert retries is not None
    tuned = replace(looked, steps=replace(looked.steps, count=1000 * retries, left_out=999 * retries))
    findings, _ = ask({name: rule}, tuned)
    assert f"{retries} retries in {retries} steps" in " ".join(findings[0].evidence)


def test_a_healthy_busy_device_has_no_fault():
    findings, _ = ask(RULES, profile(device=card()))
    assert findings == ()


def test_a_hosts_short_forward_does_not_hide_what_a_device_computes_twice():
    ahead = profile(
        forward_ms=2, backward_ms=3, other_ms=95, device=card(peak_bytes=20 * GIB), program=on_device(1.0)
    )
    findings, _ = ask({"needless-recompute": RULES["needless-recompute"]}, ahead)
    assert findings[0].lost_ns_per_step == pytest.approx(0.25 * 95e6, rel=0.05)


def test_other_processes_on_the_device_are_a_note_and_no_finding():
    shared = profile(device=card(other_processes=2, other_sm_share=0.4))
    assert "2 other processes computed on the device 40 % of the time" in traps(shared)[0]
    assert diagnosed(shared).findings == ()
    assert traps(shared)[0] in diagnosed(shared).notes
    assert traps(profile(device=card(other_processes=1, other_sm_share=0.01))) == ()
    assert traps(profile(device=card(other_processes=0))) == ()


def test_fragmentation_explains_the_retries():
    torn = card(alloc_retries=300, retry_ns=8e6, inactive_split_bytes=24 * GIB, reserved_bytes=76 * GIB)
    findings, _ = ask(RULES, profile(device=torn))
    assert [finding.rule for finding in findings] == ["memory-fragmentation"]


# -- work of ranks


def log(rank: int, tokens_S: np.ndarray, forward_S: np.ndarray) -> RankLog:
    steps = np.zeros((len(tokens_S), len(COLUMNS)), dtype=np.int64)
    steps[:, COLUMNS.index("tokens")] = tokens_S
    steps[:, COLUMNS.index("samples")] = 8
    steps[:, COLUMNS.index("forward")] = forward_S
    return RankLog(path=Path("rank.sqlite"), meta={"rank": rank}, steps=steps)


def imbalance(*logs: RankLog, warmup: int) -> Imbalance | None:
    reduced = reduce_logs(enumerate(logs), Window(warmup=warmup), Script())
    assert reduced.across is not None
    return imbalance_of(reduced.across, {place: one.rank for place, one in reduced.ranks.items()})


def test_the_fullest_rank_of_each_step_sets_the_pace():
    even, odd = np.tile([100, 300], 50), np.tile([300, 100], 50)
    work = imbalance(log(0, even, 1000 * even), log(1, odd, 1000 * odd), warmup=4)
    assert work is not None
    assert (work.unit, work.mean, work.spread) == ("tokens", 200, 100)
    assert work.forward_ns_per_unit == pytest.approx(1000)
    assert work.correlation == pytest.approx(1.0)
    assert work.fullest == {0: pytest.approx(0.5), 1: pytest.approx(0.5)}


def test_a_forward_that_does_not_follow_the_size_of_the_batch_has_no_correlation():
    chance = np.random.default_rng(0)
    sizes = [chance.integers(100, 300, 200) for _ in range(2)]
    times = [chance.integers(100_000, 300_000, 200) for _ in range(2)]
    work = imbalance(*(log(r, sizes[r], times[r]) for r in range(2)), warmup=0)
    assert work is not None
    assert work.correlation < 0.3


def test_a_rank_that_is_far_slower_than_its_few_more_tokens_is_no_uneven_work():
    chance = np.random.default_rng(0)
    sizes = [chance.integers(95, 106, 200), chance.integers(101, 112, 200)]
    assert imbalance(*(log(r, sizes[r], (1000 + 800 * r) * sizes[r]) for r in range(2)), warmup=0) is None
    assert imbalance(*(log(r, sizes[r], 1000 * sizes[r]) for r in range(2)), warmup=0) is not None


def test_equal_batches_and_single_ranks_have_no_imbalance():
    same = np.full(100, 128)
    assert imbalance(log(0, same, 1000 * same), log(1, same, 1000 * same), warmup=1) is None
    assert imbalance(log(0, np.arange(1, 101), 1000 * same), warmup=1) is None


SCRIPT = """
import gc, sys, time, torch
import torch.distributed as dist
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids):
        until = time.thread_time() + 2e-5 * ids.numel()
        while time.thread_time() < until:
            pass
        return self.table(ids).sum()

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, fault = dist.get_rank(), sys.argv[1]
chance = torch.Generator().manual_seed(rank)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = [[number] for number in range(600_000)] if fault == "gc-straggler" and rank == 1 else []
for step in range(60):
    if kept:
        gc.collect()
    length = int(torch.randint(1, 400, (1,), generator=chance)) if fault == "uneven-work" else 200
    optimizer.zero_grad()
    model(torch.randint(1, 50, (4, length), generator=chance)).backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def profile_of(fault: str, folder: Path) -> Profile:
    return diagnosed(load_profile(recorded(folder, SCRIPT, fault, num_ranks=2)))


@pytest.mark.extended
def test_ranks_with_batches_of_different_length_wait_for_the_fullest(tmp_path: Path):
    profile = profile_of("uneven-work", tmp_path)
    found = {finding.rule: finding for finding in profile.findings}
    assert "uneven-work" in found
    assert "compute-straggler" not in found
    work = profile.program.imbalance
    assert work is not None
    assert work.forward_ns_per_unit > 0.8 * 20e3  # what the script computes for a token
    assert work.spread / work.mean == pytest.approx(0.33, abs=0.12)  # of two draws from 1 to 400


@pytest.mark.extended
def test_a_collector_that_stops_one_rank_is_named_and_counted_once(tmp_path: Path):
    profile = profile_of("gc-straggler", tmp_path)
    found = {finding.rule: finding for finding in profile.findings}
    assert found["gc-straggler"].ranks == (1,)
    assert "compute-straggler" not in found
    assert "uneven-work" not in found


def test_a_fault_of_one_rank_is_not_one_of_the_device():
    even = replace(profile(device=card()), program=Program())
    assert not [name for name in ("uneven-work", "gc-straggler") if RULES[name].applies(even)]
