"""Which calls of a model compute again what it is trained on, whatever tensors the samples come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from diagnose.core.graph import Graph
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Calls, Program
from diagnose.hooks._contents import contents_of, look
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.forward import ForwardHook
from diagnose.hooks.model_calls import LOOKED_AT, ModelCallsHook
from diagnose.rules._engine import built_in
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from tests.fakes import FakeClock, measured

RULE = built_in()["extra-forward"]

Step = Callable[[int], None]


def told(models: list[nn.Module], step: Step, recorder: Recorder | None = None) -> dict[str, Any]:
    """Returns what is told of the calls in steps that are given their number."""
    recorder = recorder or Recorder()
    for model in models:
        recorder.met.model_appears(model)
    with ForwardHook().install(recorder), ModelCallsHook().install(recorder):
        for inspect in recorder.looks.inspections:
            inspect()
        for number in range(LOOKED_AT + 2):
            step(number)
            recorder.steps += 1
    assert not recorder.notes
    return dict(recorder.facts["calls"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x.float()))
        return out if weight is None else out * weight


AGAIN: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "from numpy": lambda net, x: net(torch.as_tensor(x.numpy().copy())),
    "cut off": lambda net, x: net(x.detach()),
    "in another type": lambda net, x: net(x.double()),
    "one more axis": lambda net, x: net(x[None]),
    "the first half": lambda net, x: net(x[: len(x) // 2]),
    "in parts": lambda net, x: [net(part) for part in x.split(8)],
    "one by one": lambda net, x: [net(row) for row in x],
    "a few of many": lambda net, x: net(x[100:130]),
    "shuffled": lambda net, x: net(x[torch.randperm(len(x))]),
    "the encoder": lambda net, x: net.encoder(x.clone()),
}


@pytest.mark.parametrize("again", AGAIN)
def test_the_same_samples_are_known_in_other_tensors(again: str):
    net = Net()

    def step(number: int) -> None:
        x = torch.randn(300 if again == "a few of many" else 24, 4)
        net(x)
        with torch.no_grad():
            AGAIN[again](net, x)

    facts = told([net], step)
    calls = {"in parts": 3.0, "one by one": 24.0}.get(again, 1.0)
    assert (facts["repeated"], facts["free"], facts["repeated_share"]) == (calls, 0.0, 1.0)


def test_an_episode_is_known_again_after_the_update_that_ends_the_step():
    net, recorder = Net(), Recorder()

    def step(number: int) -> None:
        episode = [np.random.default_rng(number * 100 + row).normal(size=4) for row in range(24)]
        for observation in episode:
            net(torch.as_tensor(observation).unsqueeze(0))
        recorder.steps += 1  # as the optimizer of a loop without a loader tells it
        with torch.no_grad():
            for observation in episode:
                net(torch.as_tensor(observation).unsqueeze(0))
        recorder.steps -= 1  # which `told` counts

    facts = told([net], step, recorder)
    assert (facts["repeated"], facts["free"]) == (24.0, 0.0)


OTHERS: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "other samples": lambda net, x: net(torch.randn_like(x)),
    "one other sample": lambda net, x: net(torch.cat([x[:-1], torch.randn(1, 4)])),
    "shifted by one": lambda net, x: net(torch.cat([x[1:], torch.randn(1, 4)])),
    "with noise": lambda net, x: net(x + 0.1 * torch.randn_like(x)),
    "with something else beside": lambda net, x: net(x, torch.randn(len(x), 1)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_samples_are_not_the_same(other: str):
    net = Net()

    def step(number: int) -> None:
        x = torch.randn(24, 4)
        net(x, torch.randn(len(x), 1))
        with torch.no_grad():
            OTHERS[other](net, x)

    facts = told([net], step)
    assert (facts["repeated"], facts["judged"], facts["free"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("same", [True, False])
def test_samples_with_hardly_any_numbers_are_the_same_in_the_same_memory_alone(same: bool):
    net = Net()

    def step(number: int) -> None:
        x = torch.eye(4)
        net(x)
        with torch.no_grad():
            net(x.detach() if same else torch.eye(4))

    assert told([net], step)["repeated"] == float(same)


def test_another_model_with_the_same_samples_does_not_compute_them_again():
    actor, critic, teacher = Net(), Net(), Net()

    def step(number: int) -> None:
        x = torch.randn(24, 4)
        actor(x)
        with torch.no_grad():
            critic(x)
            teacher(x)

    facts = told([actor, critic], step)
    assert (facts["repeated"], facts["untrained"], facts["repeated_share"]) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("again", [0, 6, 24])
@pytest.mark.parametrize("how", ["judged", "judged_with_grad"])
def test_a_call_in_evaluation_mode_is_counted_apart_unless_each_step_trains_on_all_there_is(
    how: str, again: int
):
    """Some samples of a small data set may come again in each step."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    everything = torch.randn(24, 4)

    def step(number: int) -> None:
        x = torch.cat([everything[:again], torch.randn(24 - again, 4)])
        net.train()(x)
        net.eval()
        with torch.set_grad_enabled(how == "judged_with_grad"):
            net(x.clone())
        net.train()

    facts = told([net], step)
    counted = {each: facts[each] for each in ("repeated", "judged", "judged_with_grad") if facts[each]}
    assert counted == ({} if again == len(everything) else {how: 1.0})


@pytest.mark.parametrize("stepped", [False, True])
def test_a_call_before_the_training_call_is_counted_where_the_weights_are_the_same(stepped: bool):
    net, recorder = Net(), Recorder()

    def step(number: int) -> None:
        x = torch.randn(24, 4)
        with torch.no_grad():
            net(x)
        if stepped:
            times = recorder.met.stepped_times
            times[1] = times.get(1, 0) + 1  # as an optimizer tells
        net(x.clone())

    facts = told([net], step, recorder)
    counted = float(not stepped)
    assert (facts["repeated"], facts["repeated_before"], facts["free"]) == (0.0, counted, 1 - counted)
    assert facts["before_share"] == counted


def test_acting_first_and_learning_then_is_no_call_for_nothing():
    net = Net()

    def step(number: int) -> None:
        rows = [torch.randn(1, 4) for _ in range(24)]
        with torch.no_grad():
            for row in rows:
                net(row)
        net(torch.cat(rows))

    facts = told([net], step)
    assert (facts["repeated"], facts["repeated_before"], facts["free"]) == (0.0, 0.0, 24.0)
    assert facts["free_rows"] == 1


def test_a_policy_that_acts_for_all_its_environments_at_once_is_given_all_of_them():
    net = Net()

    def step(number: int) -> None:
        with torch.no_grad():
            net(torch.randn(200, 4))  # what the samples are worth
            net(torch.randn(64, 4))
        net(torch.randn(24, 4))

    facts = told([net], step)
    assert (facts["free"], facts["free_rows"]) == (2.0, 64)


def test_a_first_pass_whose_output_the_second_one_gets_is_needed():
    net = Net()

    def step(number: int) -> None:
        x = torch.randn(24, 4)
        with torch.no_grad():
            first = net(x)
        net(x, first)

    assert told([net], step)["repeated_before"] == 0.0


def test_of_what_a_teacher_computes_besides_the_call_for_nothing_is_only_a_part():
    net, teacher = Net(), nn.Sequential(nn.Linear(4, 140), nn.Linear(140, 2))

    def step(number: int) -> None:
        x = torch.randn(24, 4)
        net(x)
        with torch.no_grad():
            teacher(x)
            net(x)

    facts = told([net], step)
    assert facts["repeated"] == facts["untrained"] == 1.0
    assert 0.02 < facts["repeated_share"] < 0.1


def test_a_tensor_that_is_not_contiguous_or_of_sixteen_bits_is_read_like_another():
    x = torch.randn(6, 5, 4)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    plain, strided = contents_of((x,)), contents_of([turned])
    assert plain is not None and strided is not None
    assert (plain.whole, plain.rows) == (strided.whole, strided.rows)
    half = contents_of({"x": x.bfloat16()})
    assert half is not None and half.is_read and half.whole is not None
    assert contents_of((torch.tensor(1.0), "text")) is None
    assert contents_of((torch.empty(0, 4),)) is not None


def test_a_tensor_looks_different_once_it_has_changed():
    weight = nn.Parameter(torch.randn(40, 30))
    before = look(weight)
    assert look(weight) == before
    weight.data.mul_(2)
    assert look(weight) != before


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8), nn.Embedding(50, 8, padding_idx=0)

    def forward(self, user: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        return (self.users(user)[:, None] * self.items(history)).sum((1, 2))


def test_padding_of_what_is_not_given_first_is_told_apart():
    history = torch.randint(1, 50, (4, 20)).tril(diagonal=8)
    model, user = Recommender(), torch.arange(4)
    calls = told([model], lambda _: model(user, history).sum().backward())
    assert calls["padding_share"] == (11 + 10 + 9 + 8) / 80
    assert (calls["padded_tokens"], calls["padded_beside"]) == (80, True)
    longer = Recommender()
    calls = told([longer], lambda _: longer(history[:, 0], history).sum().backward())
    assert calls["padded_beside"] is True
    first = Net()
    calls = told([first], lambda _: first(torch.randn(4, 4)).sum().backward())
    assert (calls["padding_share"], calls["padded_beside"]) == (None, False)


def checked(profile: Profile, **calls: Any) -> Any:
    program = Program(calls=Calls(num_steps=5, **calls), graph=profile.program.graph)
    return RULE.check(replace(profile, program=program))


def test_calls_without_gradients_cost_their_part_of_what_is_computed_without_them():
    fires = RULE.fires_on[0]
    whole = checked(fires, repeated=1.0)
    part = checked(fires, repeated=1.0, repeated_share=0.25)
    assert part.lost_ns_per_step == pytest.approx(whole.lost_ns_per_step / 4)
    both = checked(fires, repeated=0.4, judged=0.4, repeated_share=0.5)
    assert both.lost_ns_per_step == pytest.approx(whole.lost_ns_per_step / 2)
    assert checked(fires, repeated=0.2, judged=0.2) is None


def test_a_call_with_gradients_in_evaluation_mode_takes_no_longer_than_the_one_that_trains():
    program = Program(
        calls=Calls(num_steps=5, repeated=0.0, judged_with_grad=1.0),
        graph=Graph(num_nodes=100, wasted_share=0.5),
    )
    beside_a_validation = profile(evaluation_ms=60, program=program)
    found = RULE.check(beside_a_validation)
    assert found is not None
    assert found.lost_ns == {Phase.EVALUATION: beside_a_validation.spent_ns(Phase.FORWARD)}
    acting = (at("a = policy(obs)", 0.6, "rollout", phase=Phase.EVALUATION),)
    assert RULE.check(replace(beside_a_validation, where=acting)) is None


def attacked(net: nn.Module, x: torch.Tensor) -> None:
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(given).sum(), given)
    net.train()(x + 0.1 * gradient.sign()).sum().backward()


def attacked_scaled(net: nn.Module, x: torch.Tensor) -> None:
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(given * 1.0).sum(), given)
    net.train()(x + 0.1 * gradient.sign()).sum().backward()


BESIDE: dict[str, tuple[Callable[[nn.Module, torch.Tensor], Any], float]] = {
    "attack": (attacked, 0.0),
    "attack on what is made of the samples": (attacked_scaled, 0.0),
    "Fisher information of the weights": (lambda net, x: net(x).square().sum().backward(), 0.0),
    "input that would have a gradient": (lambda net, x: net(x.clone().requires_grad_()), 0.0),
    "accuracy": (lambda net, x: net(x).argmax(1), 1.0),
    "accuracy, twice": (lambda net, x: (net(x).argmax(1), net(x).amax(1)), 2.0),
}


@pytest.mark.parametrize("how", BESIDE)
def test_a_call_in_evaluation_mode_from_which_gradients_are_taken_is_not_for_nothing(how: str):
    """After the loss of the clean batch. A Fisher information is that of the weights as they are."""
    beside, judged = BESIDE[how]
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with measured(FakeClock()) as recorder:
        for x in DataLoader(torch.randn(40 * 24, 4), batch_size=24):  # type: ignore[arg-type]
            optimizer.zero_grad()
            net(x).sum().backward()
            net.eval()
            beside(net, x)
            net.train()
            optimizer.step()
        assert recorder.facts["calls"]["judged_with_grad"] == judged


METHODS: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "a method": lambda net, x: net.logits(x),
    "forward itself": lambda net, x: net.forward(x),
    "the first layer alone": lambda net, x: net.encoder(x),
    "layers of the loop's choice": lambda net, x: net.head(net.encoder(x).flip(0)),
    "other samples": lambda net, x: net.logits(x + 1),
    "other samples after these": lambda net, x: (net.logits(x), net.logits(x + 1)),
}


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ("a method", 1.0),
        ("forward itself", 1.0),
        ("the first layer alone", 1.0),
        ("layers of the loop's choice", 40 * 4 / (40 * 4 + 18 * 8)),
        ("other samples", 0.0),
        ("other samples after these", 0.5),
    ],
)
def test_all_that_a_method_of_the_model_computes_again_is_for_nothing(how: str, share: float):
    net = Net()

    def step(number: int) -> None:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        net(x).sum().backward()
        with torch.no_grad():
            METHODS[how](net, x)

    calls = told([net], step)
    assert calls["repeated"] == (1 if share else 0)
    assert calls["repeated_share"] == pytest.approx(share)


def test_a_part_that_another_model_computes_in_between_ends_what_a_method_goes_on_with():
    net, judge = Net(), Net()

    def step(number: int) -> None:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        (net(x) + judge(x)).sum().backward()
        with torch.no_grad():
            net.encoder(x)
            judge.logits(x + 1)

    assert told([net, judge], step)["repeated_share"] == pytest.approx(1 / (2 + 18 * 8 / (40 * 4)))
