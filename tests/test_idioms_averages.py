"""Loops that average weights, or states that were kept of a model."""

from __future__ import annotations

import pytest

from diagnose.source.purposes import EMA, PYTHON_LOOP
from tests.marked import of_marked

KEPT = """
def __call__(self, *_):
    now = self.model.state_dict()
    self.kept = [
        {k: decay * old + (1 - decay) * now[k] for k, old in kept.items()}  # here
        for decay, kept in zip(self.decays, self.kept)
    ]
"""


def test_states_that_were_kept_of_a_model_are_averaged_too():
    assert of_marked(KEPT) == (EMA,)
    of_losses = KEPT.replace("self.model.state_dict()", "self.losses.mean()")
    assert of_marked(of_losses) == (PYTHON_LOOP,)


AVERAGES = """
def after_step(self, model):
    for decay, average in zip(self.decays, self.averaged):
        live, kept = model.state_dict(), average.state_dict(){}
        for name, value in live.items():{}
            if value.is_floating_point():{}
                kept[name] = decay * kept[name] + (1 - decay) * value{}
            else:
                kept[name] = value{}
        average.load_state_dict(kept){}
        best = model.state_dict(){}
"""


@pytest.mark.parametrize("place", range(7))
def test_what_gets_and_puts_back_the_states_that_are_averaged_is_a_part_of_that(place: int):
    marks = ["  # here" if number == place else "" for number in range(7)]
    assert of_marked(AVERAGES.format(*marks), "after_step") == ((EMA,) if place < 6 else (PYTHON_LOOP,))


def test_states_that_are_loaded_beside_no_average_are_none_of_one():
    loop = "for net in nets:\n    for v in old.values():\n        v.mul_(2)\n"
    assert of_marked(loop + "    net.load_state_dict(old)  # here") == (PYTHON_LOOP,)


def test_a_training_loop_that_also_averages_is_no_average_as_a_whole():
    text = """
for step in range(steps):
    kept = make(step)  # here
    loss(net(kept)).backward()
    optimizer.step()
    with torch.no_grad():
        old.weight.copy_(tau * net.weight + (1 - tau) * old.weight)
"""
    assert of_marked(text) == ()


KEPT_BY_NAME = """
kept = {{n: p.detach().clone() for n, p in net.named_parameters()}}
later = copy.deepcopy(net.state_dict())
noise = {{n: torch.randn_like(p) for n, p in net.named_parameters()}}
for n, p in {}:
    {}  # here
"""
BY_NAME, OF_STATE = "net.named_parameters()", "net.state_dict().items()"


@pytest.mark.parametrize(
    ("over", "line", "idiom"),
    [
        (BY_NAME, "kept[n].mul_(m).add_(p.detach(), alpha=1 - m)", EMA),
        (BY_NAME, "kept[n].copy_(kept[n] * m + p * r)", EMA),
        (OF_STATE, "later[n] = (later[n] * count + p) / (count + 1)", EMA),
        (OF_STATE, "later[n] = later[n] + r * (p - later[n])", EMA),
        ("later.items()", "p *= m; p += much * kept[n]", EMA),
        ("enumerate(net.parameters())", "kept[n].mul_(m).add_(p.data, alpha=r)", EMA),
        ("zip(later, names)", "kept[n].mul_(m).add_(later[n], alpha=r)", EMA),
        (BY_NAME, "noise[n].mul_(m).add_(p, alpha=r)", PYTHON_LOOP),
        (BY_NAME, "p.mul_(m).add_(noise[n])", PYTHON_LOOP),
        (BY_NAME, "p.mul_(kept[n])", PYTHON_LOOP),
        (BY_NAME, "kept[n] += p", PYTHON_LOOP),
        (BY_NAME, "kept[n].copy_(p)", PYTHON_LOOP),
        ("rows", "sums[n].mul_(m).add_(p, alpha=r)", PYTHON_LOOP),
    ],
)
def test_an_average_may_be_kept_by_name(over: str, line: str, idiom: str):
    assert of_marked(KEPT_BY_NAME.format(over, line)) == (idiom,)
