"""Loops over weights are told by the tensors that they are seen to write to, in whatever words."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.analysis.profile import load_profile
from diagnose.analysis.writing import Writing
from diagnose.hooks._writes import fresh_midst, grown_midst
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from tests.running import recorded

FRAME = ("/home/me/train.py", 7, "Bound.at_gradients")
NOBODY = ("", 0, "")


def seen(*counts: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((index,), each) for index, each in enumerate(counts)]


def test_a_sample_between_the_first_and_the_last_gradient_is_in_the_midst():
    looks = seen((0, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 0, 0))
    assert fresh_midst(looks) == [False, True, False, False, True]


def test_gradients_of_weights_used_twice_are_written_to_as_the_others_are():
    looks = seen((1, 0, 0, 0), (2, 1, 1, 1), (1, 0, 0, 0), (2, 1, 0, 0))
    assert fresh_midst(looks) == [False, False, False, True]


def test_a_gradient_that_is_not_there_tells_nothing():
    assert fresh_midst(seen((-1, -1, -1, -1), (0, 0, 0, 0), (-1, -1, -1, -1))) == [False] * 3


@pytest.mark.parametrize("looks", [[], seen((0, 0, 0, 0), (3, 2, 2, 2), (4, 4, 3, 3))])
def test_counts_that_only_grow_are_not_of_gradients_made_anew(looks):
    assert fresh_midst(looks) == [False] * len(looks)


def test_copies_that_differ_by_other_counts_than_between_turns_are_in_the_midst():
    quiet = seen((10, 12, 10, 10), (20, 22, 20, 20), (30, 32, 30, 30))
    looks = seen((11, 13, 10, 10), (21, 23, 21, 21), (32, 33, 31, 31))
    assert grown_midst(looks, quiet) == [True, False, True]
    assert grown_midst(looks, []) == [False] * 3


def test_what_is_written_to_less_often_is_another_loop_s():
    quiet = seen((0, 0, 0, 0, 5), (10, 10, 10, 10, 5))
    looks = seen((3, 3, 3, 3, 5), (7, 7, 7, 7, 6))
    assert grown_midst(looks, quiet) == [False, False]


@pytest.mark.parametrize(
    ("looks", "gradients", "copies", "purpose"),
    [(12, 6, 0, "clip"), (12, 1, 7, "ema"), (12, 2, 3, ""), (40, 5, 5, ""), (4, 4, 0, "clip")],
)
def test_a_line_has_the_purpose_that_it_was_often_seen_in(looks, gradients, copies, purpose):
    writing = Writing([((NOBODY, FRAME), looks, gradients, copies)], Roles((), Sources({})))
    assert writing.purpose([FRAME]) == purpose
    assert writing.purpose([("/home/me/train.py", 8, "main")]) == ""


SCRIPT = """
import sys, torch

torch.set_num_threads(1)

class Part:
    def told(self, what, net):
        pass

class Bound(Part):
    def told(self, what, net):
        if what == "slopes":
            for group in net.children():
                for entry in group.parameters():
                    self.one(entry)

    def one(self, entry):
        size, most = entry.grad.abs().mean(), entry.abs().mean().clamp(min=1e-3)
        entry.grad.copy_(torch.where(size < most, entry.grad, entry.grad * (most / size)))

class Elder(Part):
    def __init__(self, net):
        self.rows = [[entry.detach().clone() for entry in net.parameters()] for _ in range(3)]

    @torch.no_grad()
    def told(self, what, net):
        if what == "moved":
            for age, row in enumerate(self.rows, 2):
                for old, entry in zip(row, net.parameters()):
                    old.add_(entry - old, alpha=1 / (10 * age))

class Look(Part):
    @torch.no_grad()
    def told(self, what, net):
        if what == "slopes":
            self.seen = [entry.grad.abs().amax() / entry.abs().amax() for entry in net.parameters()]
        if what == "moved":
            self.moved = [entry.abs().mean() for entry in net.parameters() for _ in range(4)]

torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(40)))
opt = torch.optim.SGD(net.parameters(), 1e-3, fused=True)
part = {"bound": Bound, "elder": lambda: Elder(net), "look": Look}[sys.argv[1]]()
x = torch.randn(32, 48)
for step in range(250):
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    part.told("slopes", net)
    opt.step()
    part.told("moved", net)
"""


@pytest.mark.parametrize(("part", "idiom"), [("bound", {"clip"}), ("elder", {"ema"}), ("look", set())])
def test_what_is_called_by_no_name_is_told_by_what_it_writes_to(tmp_path: Path, part: str, idiom: set[str]):
    lines = [line for line in load_profile(recorded(tmp_path, SCRIPT, part)).where if "." in line.function]
    assert sum(line.share for line in lines) > 0.1
    written = {each for line in lines for each in line.idiom} & {"clip", "ema"}
    assert written == idiom
