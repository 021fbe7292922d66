"""How many operations on tensors the lines of an optimizer's step have, and which go over tensors."""

from __future__ import annotations

from textwrap import dedent

import pytest

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import PYTHON_LOOP
from diagnose.source.sources import Sources

FILE = "/train.py"

LION = """\
def step(self):
    for group in self.param_groups:
        for p in group["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            u = m.mul(b1).add(p.grad, alpha=1 - b1)
            p.mul_(1 - group["lr"] * group["wd"]).add_(u.sign_(), alpha=-group["lr"])
            m.mul_(b2).add_(p.grad, alpha=1 - b2)
"""
ADAM = """\
def step(self):
    for p in self.params:
        g, state = p.grad, self.state[p]
        state["step"] += 1
        state["m"] = b1 * state["m"] + (1 - b1) * g
        bias = 1 - b1 ** state["step"]
        rate = lr * math.sqrt(1 - b2 ** state["step"]) / bias
        p -= rate * state["m"]
"""
SGD = """\
def step(self):
    for p in self.params:
        buf = self.kept[p]
        buf.mul_(mu).add_(p.grad)
        p.add_(buf, alpha=-lr * (1 - mu ** self.count))
"""

MUON = """\
def orthogonal(g):
    x = g / g.norm()
    for _ in range(5):
        a = x @ x.mT
        x = 3.4 * x + (b * a + c * a @ a) @ x
    return x
"""


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        pytest.param(LION, {4: 0, 5: 2, 6: 3, 7: 2}, id="methods"),
        pytest.param(ADAM, {4: 0, 5: 3, 6: 0, 7: 0, 8: 2}, id="operators, and numbers beside"),
        pytest.param(SGD, {4: 2, 5: 1}, id="few"),
        pytest.param(MUON, {2: 2, 4: 0, 5: 0}, id="products"),
    ],
)
def test_operations_on_tensors_are_counted_and_those_on_numbers_are_not(text, counts):
    idioms = Idioms(Places(Sources({FILE: text})))
    assert {line: idioms.operations(FILE, line) for line in counts} == counts


OWN = """\
def one(p, m):
    m.mul_(0.9).add_(p.grad)

def step(self):
    for group in self.param_groups:
        torch._foreach_add_(group["params"], grads)
        for p in group["params"]:
            one(p, self.state[p])
        many(group)

def many(group):
    torch._foreach_mul_(group["params"], 0.9)
"""


def of_step(*stack: tuple[int, str]) -> tuple[str, ...]:
    frames = [(FILE, line, function) for line, function in stack]
    return Idioms(Places(Sources({FILE: dedent(OWN)}))).of(frames, phase=Phase.OPTIMIZER)


def test_a_function_that_a_step_calls_for_each_tensor_is_a_part_of_its_loop():
    assert of_step((2, "one"), (8, "Own.step")) == (PYTHON_LOOP,)
    assert of_step((8, "Own.step")) == (PYTHON_LOOP,)


def test_one_call_for_all_tensors_of_a_group_is_no_loop_over_them():
    assert of_step((6, "Own.step")) == ()
    assert of_step((12, "many"), (9, "Own.step")) == ()
