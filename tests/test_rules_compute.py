"""Rules of compute, on real runs with the fault and without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from diagnose.analysis.profile import load_profile
from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.host import HostStats
from diagnose.core.profile import Profile
from diagnose.core.program import Optimizer, Program
from diagnose.hooks._graph import walk
from diagnose.hooks._graph_facts import summarize
from diagnose.rules import diagnosed
from diagnose.rules._engine import built_in
from diagnose.rules._examples import profile
from diagnose.rules._update_times import SAVED
from diagnose.rules.anomaly_mode import BACKWARD_NS, BYTE_NS
from diagnose.rules.slow_optimizer import SlowOptimizer
from tests.mixing import mostly_extended
from tests.running import recorded

pytestmark = pytest.mark.alone

RULE = built_in()["unfused-attention"]

SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
torch.set_num_threads(1)
fault = sys.argv[1]
layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(12))
optimizer = torch.optim.AdamW(layers.parameters(), fused=fault != "slow-optimizer")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if fault == "needless-recompute" else layer(x)
        return x

model = Net()
for step in range(60):
    x = torch.randn(256 if fault != "slow-optimizer" else 8, 128)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if fault == "extra-forward":
        with torch.no_grad():
            model(x).abs().mean()
"""

FAULTS = ("slow-optimizer", "needless-recompute", "extra-forward")


def profile_of(fault: str, folder: Path) -> Profile:
    return diagnosed(load_profile(recorded(folder, SCRIPT, fault)))


def named(profile: Profile) -> dict[str, Finding]:
    return {finding.rule: finding for finding in profile.findings}


@pytest.mark.parametrize("fault", mostly_extended(dict(zip(FAULTS, FAULTS, strict=True)), "slow-optimizer"))
def test_a_fault_is_found_in_a_real_run(fault: str, tmp_path: Path):
    profile = profile_of(fault, tmp_path)
    found = named(profile)
    assert fault in found, (found.keys(), profile.program)
    share = found[fault].lost_ns_per_step / profile.step_time_ns
    assert 0.04 < share < 0.8


def test_the_optimizer_is_shown_as_the_script_makes_it():
    rule = built_in()["slow-optimizer"]
    fires = rule.fires_on[0]
    made = replace(fires.program.optimizers[0], call="torch.optim.AdamW(net.parameters(), lr=lr, **more)")
    finding = rule.check(replace(fires, program=replace(fires.program, optimizers=(made,))))
    assert finding is not None
    assert finding.code == "torch.optim.AdamW(net.parameters(), lr=lr, **{**more, 'fused': True})"


def test_all_optimizers_that_can_be_fused_are_named():
    rule = built_in()["slow-optimizer"]
    fires = rule.fires_on[0]
    places = (("/home/me/gan.py", 69), ("/home/me/gan.py", 70))
    made = tuple(replace(fires.program.optimizers[0], file=file, line=line) for file, line in places)
    finding = rule.check(replace(fires, program=replace(fires.program, optimizers=made)))
    assert finding is not None
    assert finding.line == 69
    assert finding.fix == "Give AdamW fused=True, and likewise what is made at gan.py:70."


@pytest.mark.parametrize(
    ("looped", "fused", "least", "most"),
    [
        ((315, 630), (35, 70_000), 0.96, 0.98),
        ((30, 60), (1, 10_000_000), 0.1, 0.2),
        ((315, 630), None, 1.0, 1.0),
    ],
)
def test_what_fusing_wins_is_a_part_of_the_time_of_several_optimizers_and_not_of_their_tensors(
    looped: tuple[int, int], fused: tuple[int, int] | None, least: float, most: float
):
    finding = slow_beside(looped, fused, optimizer_ms=30)
    assert finding is not None
    part = finding.lost_ns_per_step / (SAVED["Adam"][0] * 30e6)
    assert least - 0.001 <= part <= most + 0.001


def test_a_few_tiny_tensors_one_by_one_beside_a_large_fused_optimizer_are_no_fault():
    assert slow_beside((20, 40), (1, 100_000_000), optimizer_ms=30) is None


def slow_beside(looped: tuple[int, int], fused: tuple[int, int] | None, **parts: float) -> Finding | None:
    """Asks about an Adam of so many tensors and elements that goes one by one, beside a fused one."""
    made = tuple(
        Optimizer(
            kind="Adam", num_tensors=of[0], num_elements=of[1], implementation=implementation, can_fuse=True
        )
        for implementation, of in (("for-loop", looped), ("fused", fused))
        if of is not None
    )
    return SlowOptimizer().check(profile(program=Program(optimizers=made), **parts))


def test_gradients_are_switched_off_around_the_pass_not_at_its_backward():
    """Off at the backward they are still computed, and the next pass has none to go back through."""
    rule = built_in()["unused-gradients"]
    never_used, *_, within, without = rule.fires_on
    found = rule.check(within)
    assert found is not None
    off, on = found.code.splitlines()
    assert off.startswith("critic.requires_grad_(False)  # before") and "_(True)  # after" in on
    assert "not at its backward" in found.fix
    assert "The line named is where the backward of the pass begins." in found.evidence
    found = rule.check(never_used)
    assert found is not None and not (found.code or found.file)
    found = rule.check(without)
    assert found is not None and not found.code and "each module that is not trained" in found.fix


def test_attention_that_torch_computes_step_by_step_is_not_said_to_be_written_out():
    """Dropout keeps `scaled_dot_product_attention` from its kernel on a CPU."""
    q_BHTD = torch.randn(2, 2, 8, 4, requires_grad=True)
    called_BHTD = nn.functional.scaled_dot_product_attention(q_BHTD, q_BHTD, q_BHTD, dropout_p=0.1)
    written_BHTD = (q_BHTD @ q_BHTD.transpose(-2, -1)).softmax(-1) @ q_BHTD
    for y_BHTD, said, code in (
        (called_BHTD, "no fused kernel has dropout", False),
        (written_BHTD, "q k^T", True),
    ):
        facts = summarize(*walk(y_BHTD.grad_fn), ())
        assert facts["num_attentions"] == 1
        (example, *_) = RULE.fires_on
        graph = replace(example.program.graph, names=facts["names"], num_attentions=1)
        found = RULE.check(replace(example, program=replace(example.program, graph=graph)))
        assert said in found.fix
        assert bool(found.code) == code


@pytest.mark.extended
def test_the_same_script_without_a_fault_has_none_of_them(tmp_path: Path):
    found = named(profile_of("none", tmp_path))
    assert not set(found) & {*FAULTS, "unused-gradients", "unfused-attention", "padding-waste"}


@pytest.mark.parametrize(("num_bytes", "part"), [(1e6, 1.5), (1e5, 1.0)])
def test_threads_divide_the_search_for_nan_in_large_results(num_bytes: float, part: float):
    total = Work(num_ops=60, num_bytes=60 * num_bytes)
    program = Program(graph=Graph(num_nodes=1, total=total, searches_nan=True))

    def lost_ns(threads: int) -> float:
        host = HostStats(anomaly_share=0.9, num_threads=threads)
        found = built_in()["anomaly-mode"].check(profile(step_ms=500, host=host, program=program))
        return found.lost_ns_per_step - BACKWARD_NS

    assert lost_ns(1) == pytest.approx(BYTE_NS * total.num_bytes)
    assert lost_ns(2) == pytest.approx(lost_ns(1) / part)


def test_attention_of_three_axes_is_told_to_have_four():
    (plain, *_) = RULE.fires_on
    graph = plain.program.graph
    assert graph is not None
    flat = replace(plain, program=replace(plain.program, graph=replace(graph, attention_axes=3)))
    called = replace(graph, attention_axes=3, names={"SafeSoftmax": graph.num_attentions})
    again = replace(plain, program=replace(plain.program, graph=called))
    for job in (flat, again):
        found = RULE.check(job)
        assert found is not None and "four axes" in found.fix and "q[:, None]" in found.code
        assert "dropout" not in found.fix


def test_with_few_keys_and_no_mask_the_fused_kernel_of_threads_wins_nothing():
    """With a mask there is more between the products, and it does: as measured for 176 keys."""

    def found(**work: float) -> Finding | None:
        products = Work(num_ops=8, backward_ns=1.24e6, forward_ns=0.62e6)
        graph = Graph(
            num_nodes=90,
            total=Work(num_ops=60, backward_ns=12e6, forward_ns=8e6),
            attention=Work(num_ops=24, **work),
            attention_products=products,
            num_attentions=3,
            attention_keys=176,
        )
        host = HostStats(num_threads=2)
        run = profile(step_ms=20, forward_ms=8, backward_ms=12, host=host, program=Program(graph=graph))
        return RULE.check(run)

    masked = found(backward_ns=2.18e6, forward_ns=1.56e6)
    assert masked is not None and masked.lost_ns_per_step == pytest.approx(0.92e6, rel=0.05)
    assert found(backward_ns=1.45e6, forward_ns=0.85e6) is None
