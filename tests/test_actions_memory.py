"""Actions that save memory: what training computes with them, without them, and after they are undone."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions import activation_checkpointing
from diagnose.actions._block_costs import BlockCost, cheapest, measure_blocks
from diagnose.actions._boundary import Segment
from diagnose.actions._careful import Failure
from diagnose.actions._checkpointed import checkpointed
from diagnose.actions._pieces import Pieces
from diagnose.actions._routes import routed
from diagnose.actions._shadow import compare_gradients
from diagnose.actions._watch import watched
from diagnose.actions.activation_checkpointing import ActivationCheckpointing, blocks_of
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.micro_batching import MicroBatching
from diagnose.actions.oom_replay import OomReplay
from diagnose.actions.optimizer_in_backward import OptimizerInBackward
from diagnose.actions.save_on_cpu import SaveOnCpu, saving_route
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from tests.fakes import FakeClock, measured
from tests.running import SCRIPTS, TIMEOUT_S, environment

BATCH = 12
STEPS = 6
ON = range(2, 4)
"""Steps in which an action is in force."""


class Block(nn.Module):
    """A residual block that draws random numbers in three ways, if it is to."""

    def __init__(self, width: int, *, norm: bool, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.up(self.norm(rows))))
        skipped = self.dropout.p > 0 and random.random() < 0.3
        return rows if skipped else rows + self.down(hidden)


class Net(nn.Module):
    """A stack of such blocks."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0, loss: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16, norm=norm, dropout=dropout) for _ in range(3))
        self.last = nn.Linear(16, 4)
        self.loss = loss

    def forward(self, rows: torch.Tensor, scale: float = 1.0) -> Any:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.last(hidden) * scale
        if self.loss:
            return {"logits": logits, "loss": logits.square().mean()}
        return {"logits": logits, "hidden": hidden, "size": rows.shape[0]}


def the_loss(output: Any) -> torch.Tensor:
    """Also one over the whole batch, which no piece could compute by itself."""
    logits = output["logits"]
    contrast = (logits @ logits.T).logsumexp(1).mean()
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 4) + 0.1 * contrast


Applied = Callable[[Job], AbstractContextManager[None]]


def train(
    model: Any, applied: Applied | None = None, *, accumulate: int = 1, dtype: torch.dtype = torch.float64
) -> list[Any]:
    """A run under the real hooks, with a change in force in some of its steps; returns all it computed."""
    torch.manual_seed(0)
    random.seed(0)
    model = model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with measured(FakeClock()) as recorder, ExitStack() as change:
        recorder.inputs = {}
        job = Job(
            models=[model],
            optimizers=[optimizer],
            inputs=recorder.inputs,
            routes=recorder.routes,
            unmeasured=recorder.unmeasured,
        )
        for step in range(STEPS):
            if applied is not None and step == ON.start:
                change.enter_context(applied(job))
            if step == ON.stop:
                change.close()
            for _ in range(accumulate):
                rows = torch.randn(BATCH, 8, dtype=dtype)
                loss = the_loss(model(rows)) / accumulate
                loss.backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert recorder.routes == {}
        assert not recorder.notes
        recorder.finish()
        assert recorder.steps == STEPS
        assert recorder.backward_passes == STEPS * accumulate
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [losses, state, torch.rand(1).item(), random.random()]


def difference(left: list[Any], right: list[Any]) -> float:
    """How far the final weights of two runs are apart."""
    return max(float((left[1][name] - right[1][name]).abs().max()) for name in left[1])


def same(left: list[Any], right: list[Any]) -> bool:
    return str(left[0]) == str(right[0]) and difference(left, right) == 0 and left[2:] == right[2:]


def by(action: Action, value: int | None = None) -> Applied:
    """What the tuner does to put an action in force and take it out."""

    @contextmanager
    def applied(job: Job) -> Iterator[None]:
        before = action.state(job)
        with action.prepare(job, value) as prepared, action.apply(job, prepared):
            assert action.state(job) != before
            with pytest.raises(RuntimeError, match="was not undone"):
                action.verify_undone(job, before)
            yield
        action.verify_undone(job, before)

    return applied


# -- the boundary


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_call_behind_one_node_is_exact(accumulate: int, dropout: float) -> None:
    def model() -> Net:
        return Net(norm=True, dropout=dropout)

    def bounded(job: Job) -> AbstractContextManager[None]:
        return routed(job, job.models[0], lambda call, args, kwargs: Segment(call, args, kwargs).run())

    assert same(train(model, bounded, accumulate=accumulate), train(model, accumulate=accumulate))


def behind_a_node(model: nn.Module, *args: Any) -> Any:
    return Segment(lambda model, *args: model(*args), (model, *args), {}).run()


def in_three_pieces(model: nn.Module, *args: Any) -> Any:
    return Pieces(lambda model, *args: model(*args), (model, *args), {}, 3).run()


WAYS = pytest.mark.parametrize("way", [behind_a_node, in_three_pieces])


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


@WAYS
def test_inputs_get_their_gradient(way: Any) -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    ours, plain = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    way(model, (ours * 2)).square().sum().backward()
    model(plain * 2).square().sum().backward()
    assert torch.allclose(ours.grad, plain.grad, rtol=1e-12)  # type: ignore[arg-type]


@WAYS
def test_a_gradient_penalty_goes_through_twice(way: Any) -> None:
    def penalty(call: Any) -> list[torch.Tensor]:
        model, rows = net(), torch.ones(7, 3, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(call(model, rows).sum(), rows, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for ours, plain in zip(penalty(way), penalty(lambda model, rows: model(rows)), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-12)


@WAYS
def test_a_graph_that_is_kept_can_be_gone_through_again(way: Any) -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    output = way(model, rows)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    output = model(rows)
    (output.sum() + output.square().sum()).backward()
    assert all(torch.allclose(o, p.grad, rtol=1e-12) for o, p in zip(ours, model.parameters(), strict=True))


@WAYS
def test_hooks_on_parameters_run_once(way: Any) -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    fired: list[str] = []
    model[0].weight.register_hook(lambda gradient: fired.append("hook") or gradient * 0.5)  # type: ignore[func-returns-value]
    model[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append("after"))
    way(model, rows).sum().backward()
    ours = model[0].weight.grad.clone()
    assert fired == ["hook", "after"]
    model.zero_grad()
    model(rows).sum().backward()
    assert torch.allclose(ours, model[0].weight.grad, rtol=1e-12)


@WAYS
def test_outputs_may_be_changed_in_place(way: Any) -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    output = way(model, rows)
    output.mul_(2)
    output[0] = 0
    output.sum().backward()
    ours = model[0].weight.grad.clone()
    model.zero_grad()
    output = model(rows) * 2
    output[0] = 0
    output.sum().backward()
    assert torch.allclose(ours, model[0].weight.grad, rtol=1e-12)


@WAYS
def test_autocast_is_the_scripts_in_the_second_call_too(way: Any) -> None:
    class Seen(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            output = super().forward(rows)
            types.append(output.dtype)
            return output

    types: list[torch.dtype] = []
    model = Seen(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output = way(model, torch.ones(7, 3))
    output.float().sum().backward()
    assert set(types) == {torch.bfloat16}
    assert torch.equal(model.weight.grad, torch.full((2, 3), 7.0)), "no piece is lost to a cached cast"  # type: ignore[arg-type]


@WAYS
def test_inputs_may_be_written_to_before_the_backward_pass(way: Any) -> None:
    class Shifted(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows + 1)  # which keeps the sum, and not the rows

    model, rows = Shifted(3, 2), torch.ones(7, 3)
    output = way(model, rows)
    rows.zero_()
    output.sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 14.0))  # type: ignore[arg-type]


@WAYS
def test_features_kept_by_a_hook_registered_meanwhile_have_their_gradient(way: Any) -> None:
    model, rows, features = net(), torch.randn(7, 3, dtype=torch.float64), []
    model[1].register_forward_hook(lambda module, args, output: features.append(output))

    def gradients(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        (call(model, rows).sum() + features.pop().square().sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    for ours, plain in zip(gradients(way), gradients(lambda model, rows: model(rows)), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-12)


def test_parameters_changed_before_the_second_call_are_noticed() -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    output = in_three_pieces(model, rows)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# -- micro-batching


@pytest.mark.parametrize("pieces", [2, 4, 5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_pieces_of_a_batch_only_round_differently(pieces: int, accumulate: int) -> None:
    applied = by(MicroBatching(), pieces)
    left_alone = train(Net, accumulate=accumulate)
    changed = train(Net, applied, accumulate=accumulate)
    assert difference(changed, left_alone) < 1e-13
    assert changed[2:] == left_alone[2:], "random numbers go on as they would"
    assert len(changed[0]) == len(left_alone[0])


def job_of(model: Any, **options: Any) -> Job:
    return Job(models=[model], inputs={id(model): ((torch.randn(BATCH, 8),), {})}, **options)


def test_pieces_pass_the_numerics_check() -> None:
    job = job_of(Net())
    action = MicroBatching()
    with action.prepare(job, 4) as prepared:
        assert compare_gradients(job, action.apply(job, prepared), Safety.ROUNDING).ok


def test_pieces_save_memory_and_activations_of_one_are_alive() -> None:
    model = Net()
    alive: list[int] = []

    def bytes_kept(pieces: int) -> int:
        kept: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.numel() * tensor.element_size())
            return tensor

        job = job_of(model)
        action = MicroBatching()
        on = action.apply(job, (pieces, Failure())) if pieces else nullcontext()
        with on, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call = job.routes[id(model)][0] if pieces else None
            rows = torch.randn(240, 8)
            plain = lambda model, rows: model(rows)  # noqa: E731
            call(plain, (model, rows), {}) if call else plain(model, rows)
        alive.append(sum(kept))
        return sum(kept)

    weights = sum(p.numel() * 4 for p in model.parameters()) * 2
    assert bytes_kept(4) - weights < 0.35 * bytes_kept(0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Net(norm=True), "blocks.0.norm is a batch norm"),
        (lambda: Net(dropout=0.1), "blocks.0.dropout is a dropout"),
        (lambda: nn.DataParallel(Net()), "DataParallel spreads each call"),
    ],
)
def test_models_whose_samples_know_of_each_other_are_refused(model: Any, reason: str) -> None:
    with pytest.raises(CannotApply, match=reason):
        MicroBatching().check(job_of(model()))


class Noisy(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows + torch.randn_like(rows))


class Writes(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(rows)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Net(loss=True), "returns a value for the batch as a whole"),
        (lambda: Noisy(8, 8), "draws random numbers"),
        (lambda: Writes(8, 8), "writes to its own parameters"),
    ],
)
def test_what_only_a_call_shows_is_refused_in_preparation(model: Any, reason: str) -> None:
    job = job_of(model())
    before = torch.get_rng_state()
    with pytest.raises(CannotApply, match=reason), MicroBatching().prepare(job, 2):
        pass
    assert torch.equal(torch.get_rng_state(), before)


class Penalized(Net):
    """Notes on itself what the loop adds to its loss."""

    def forward(self, rows: torch.Tensor) -> Any:
        output = super().forward(rows)
        self.penalties = [output["hidden"].abs().mean()]
        return output


class Apart(Net):
    """Likewise, of a part that its output does not need."""

    def forward(self, rows: torch.Tensor) -> Any:
        self.penalty = self.last(self.first(rows)).square().mean()
        return {"logits": rows.detach() @ self.first.weight.T}


class Kept(Net):
    """Gives it to somebody else."""

    features: list[torch.Tensor] = []  # noqa: RUF012 (all share it)

    def forward(self, rows: torch.Tensor) -> Any:
        output = super().forward(rows)
        Kept.features[:] = [output["hidden"].tanh()]
        return output


SCALE = nn.Parameter(torch.ones(4))


class Scaled(nn.Linear):
    """Uses a parameter that is not its own."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * SCALE


def hooked() -> nn.Module:
    model = Net()
    model.blocks[1].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("action", [MicroBatching(), OomReplay()])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Penalized, "penalties of the model holds a tensor that has a gradient"),
        (Apart, "penalty of the model holds a tensor that has a gradient"),
        (Kept, "something keeps what a call of the model computes inside"),
        (lambda: Scaled(8, 4), "takes a gradient and is none of its parameters"),
        (hooked, "the model has forward hooks"),
    ],
)
def test_a_model_with_gradients_past_inputs_parameters_and_outputs_is_refused(
    action: Action, model: Any, reason: str
) -> None:
    job = job_of(model())
    Kept.features.clear()
    with pytest.raises(CannotApply, match=reason), action.prepare(job, 2):
        pass


@pytest.mark.parametrize("action", [MicroBatching(), OomReplay()])
def test_a_model_that_keeps_its_activations_without_gradients_is_not_refused(action: Action) -> None:
    class Shown(Net):
        """Also leaves rubbish behind."""

        def forward(self, rows: torch.Tensor) -> Any:
            output = super().forward(rows)
            self.shown = output["hidden"].detach()
            circle: list[Any] = [output["hidden"]]
            circle.append(circle)
            return output

    with action.prepare(job_of(Shown()), 2):
        pass


# -- activation checkpointing


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("share", [30, 100])
def test_checkpointing_is_exact(norm: bool, dropout: float, share: int) -> None:
    def model() -> Net:
        return Net(norm=norm, dropout=dropout)

    assert same(train(model, by(ActivationCheckpointing(), share)), train(model))


def test_checkpointing_passes_the_numerics_check_as_exact() -> None:
    job = job_of(Net(norm=True, dropout=0.2))
    action = ActivationCheckpointing()
    with action.prepare(job, 100) as prepared:
        verdict = compare_gradients(job, action.apply(job, prepared), Safety.EXACT)
    assert verdict.ok, verdict


def test_checkpointing_frees_the_bytes_it_predicts() -> None:
    def kept_bytes(model: nn.Module, rows: torch.Tensor) -> int:
        kept: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        tensors = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(rows)
        assert output is not None
        return sum(kept.values())

    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4))
    )
    job = Job(models=[model], inputs={id(model): ((torch.randn(50, 32),), {})})
    blocks = list(model)
    costs = measure_blocks(job, model, blocks)
    before = kept_bytes(model, job.inputs[id(model)][0][0])
    predicted = sum(cost.num_bytes for cost in costs)
    # What surrounds a checkpointed block keeps its inputs: they are not autograd's, and were kept before.
    with checkpointed(blocks):
        after = kept_bytes(model, job.inputs[id(model)][0][0])
    inputs = 4 * 50 * 32 * 4
    assert predicted == 4 * 50 * 128 * 4
    assert before - after in (predicted, predicted + inputs)


def costs_of(*pairs: tuple[int, int]) -> list[BlockCost]:
    return [BlockCost(block=nn.Identity(), num_bytes=b, time_ns=t) for b, t in pairs]


def test_the_cheapest_blocks_that_free_enough_are_chosen() -> None:
    costs = costs_of((100, 50), (60, 10), (60, 15), (5, 100))
    assert cheapest(costs, 100) == costs[1:3]
    assert cheapest(costs, 60) == [costs[1]]
    assert cheapest(costs, 150) == [costs[0], costs[1]]
    assert cheapest(costs, 10_000) == costs
    assert cheapest(costs_of((0, 5)), 10) == []


def test_copies_and_pickles_of_a_checkpointed_model_are_plain() -> None:
    model = Net()
    with checkpointed(model.blocks):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert all(block._compiled_call_impl is None for block in other.blocks)
    with torch.no_grad():
        model.first.weight.zero_()
    assert not torch.equal(copied(torch.ones(1, 8))["logits"], model(torch.ones(1, 8))["logits"])


def test_checkpointing_is_refused_while_there_is_memory() -> None:
    with pytest.raises(CannotApply, match="memory is not short"):
        ActivationCheckpointing().check(job_of(Net(), device="cpu"))


def test_checkpointing_is_refused_for_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpointing, "refuse_unless_short", lambda job: None)
    model = Net()
    model.compile()
    with pytest.raises(CannotApply, match="the model is compiled"):
        ActivationCheckpointing().check(job_of(model))


def test_blocks_with_hooks_of_the_script_are_left_alone() -> None:
    model = Net()
    model.blocks[1].up.register_forward_hook(lambda *_: None)
    assert blocks_of(model) == [model.blocks[0], model.blocks[2]]


def test_hooks_that_the_script_registers_while_blocks_are_checkpointed_run_once() -> None:
    model, seen = Net(), []
    with checkpointed(model.blocks):
        model.blocks[1].up.register_forward_pre_hook(lambda *_: seen.append("up"))
        model(torch.ones(2, 8))["logits"].sum().backward()
    assert seen == ["up"]


# -- replay

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Starved:
    """Raises as CUDA does, at some calls of a layer in the forward or the backward pass."""

    def __init__(
        self,
        forward: Collection[int] = (),
        backward: Collection[int] = (),
        error: type[RuntimeError] = torch.OutOfMemoryError,
        words: str = OUT_OF_MEMORY,
    ) -> None:
        self.error, self.words = error, words
        self.forward, self.backward = set(forward), set(backward)
        self.calls = self.passes = 0
        self.armed = False

    def layer(self) -> nn.Module:
        starved = self

        class Layer(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
                starved.calls += 1
                if starved.armed and starved.calls in starved.forward:
                    raise starved.error(starved.words)
                return rows.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                starved.passes += 1
                if starved.armed and starved.passes in starved.backward:
                    raise starved.error(starved.words)
                return gradient

        class Module(nn.Module):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return Layer.apply(rows)

        return Module()


def starving(starved: Starved | None = None, **options: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        net = Net(**options)
        net.blocks.append((starved or Starved()).layer())
        return net

    return model


FAILURES = [
    Starved,
    lambda: Starved(forward={2}),
    lambda: Starved(forward={2, 3}),
    lambda: Starved(backward={2}),
    lambda: Starved(backward={2, 3}),
    lambda: Starved(forward={2}, backward={2}),
]


@pytest.mark.parametrize("failure", range(len(FAILURES)))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_replayed_step_is_exact_with_batch_norm_and_dropout(failure: int, accumulate: int) -> None:
    starved = FAILURES[failure]()
    options = {"norm": True, "dropout": 0.3}
    changed = train(starving(starved, **options), failing(starved), accumulate=accumulate)
    left_alone = train(starving(**options), accumulate=accumulate)
    assert same(changed, left_alone)


def failing(starved: Starved) -> Applied:
    """Lets it fail while the action is in force; calls are counted from there."""

    @contextmanager
    def applied(job: Job) -> Iterator[None]:
        action = OomReplay()
        before = action.state(job)
        with action.prepare(job, None) as prepared, action.apply(job, prepared):
            starved.calls, starved.passes, starved.armed = 0, 0, True
            yield
            starved.armed = False
            assert starved.forward <= set(range(1, starved.calls + 1)), "every failure has happened"
            assert starved.backward <= set(range(1, starved.passes + 1)), "every failure has happened"
        action.verify_undone(job, before)

    return applied


@pytest.mark.parametrize(
    "starved",
    [
        Starved(forward={1, 2, 3}),
        Starved(forward={1, 2, 3, 4}),
        Starved(backward={1, 2, 3}),
        Starved(backward={1, 2, 3, 4}),
        Starved(forward={1, 2, 3}, backward={1, 2}),
    ],
)
def test_a_step_replayed_in_pieces_only_rounds_differently(starved: Starved) -> None:
    changed = train(starving(starved), failing(starved))
    left_alone = train(starving())
    assert 0 < difference(changed, left_alone) < 1e-12
    assert changed[2:] == left_alone[2:]


@pytest.mark.parametrize(
    "words",
    [
        "FIND was unable to find an engine to execute this computation",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`",
    ],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_cudnn_and_cublas_say_of_memory_is_replayed_too(where: str, words: str) -> None:
    failures: Any = {where: {1, 2, 3}}
    starved = Starved(**failures, error=RuntimeError, words=words)
    assert 0 < difference(train(starving(starved), failing(starved)), train(starving())) < 1e-12


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_error_is_not_replayed(where: str) -> None:
    failures: Any = {where: {2}}
    starved = Starved(**failures, error=RuntimeError, words="mat1 and mat2 shapes differ")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train(starving(starved), failing(starved))
    assert (starved.calls if where == "forward" else starved.passes) == 2


def test_what_never_fits_fails_as_it_would_have() -> None:
    starved = Starved(forward=set(range(1, 100)))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        train(starving(starved), failing(starved))


def test_replay_is_refused_on_a_cpu() -> None:
    with pytest.raises(CannotApply, match="the operating system ends the process"):
        OomReplay().check(job_of(Net()))


@pytest.mark.extended
def test_one_rank_replays_and_the_others_do_not_notice(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "replay_on_one_rank.py"), str(tmp_path / "store")],
            env=environment(WORLD_SIZE="2", RANK=str(rank)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    results = [line.split() for line in outputs[0].splitlines()]
    assert [(name, number) for name, number, *_ in results] == [
        (name, number) for number in ("1", "2") for name in ("segment", "pieces", "replay")
    ]
    for name, _, from_plain, between_ranks in results:
        assert float(between_ranks) == 0, name
        assert float(from_plain) == 0 if name == "segment" else 0 < float(from_plain) < 1e-14, name


# -- saved on the CPU


def test_activations_saved_on_the_host_are_exact() -> None:
    def applied(job: Job) -> AbstractContextManager[None]:
        return routed(job, job.models[0], saving_route(job.models[0], at_least_bytes=1))

    def model() -> Net:
        return Net(norm=True, dropout=0.3)

    assert same(train(model, applied), train(model))


def test_saving_on_the_host_is_refused_on_a_cpu() -> None:
    with pytest.raises(CannotApply, match="in the host's memory already"):
        SaveOnCpu().check(job_of(Net()))


def test_a_run_with_the_check_before_each_action_is_the_run_without() -> None:
    def applied(job: Job) -> AbstractContextManager[None]:
        for action in (MicroBatching(), ActivationCheckpointing()):
            with action.prepare(job, action.values(job)[0]) as prepared:
                assert compare_gradients(job, action.apply(job, prepared), action.safety).ok
        return watched(job)

    assert same(train(Net, applied), train(Net))


# -- the optimizer in the backward pass


class Loop:
    """A loop without hooks, whose step can be changed."""

    def __init__(
        self, kind: Any = torch.optim.AdamW, between: Any = None, passes: int = 1, scaler: Any = None
    ) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.between, self.passes = between, passes
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.job = Job(models=[self.model], optimizers=[self.optimizer])

    def steps(self, number: int) -> None:
        for _ in range(number):
            for _ in range(self.passes):
                self.scaler.scale(the_loss(self.model(torch.randn(BATCH, 8)))).backward()
            if self.between is not None:
                self.between(self)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def outcome(self) -> str:
        return str([self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()])


OPTIMIZERS = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_in_the_backward_pass_are_exact(kind: Any) -> None:
    loop = Loop(kind)
    action = OptimizerInBackward()
    before = action.state(loop.job)
    loop.steps(2)
    with action.apply(loop.job, None):
        loop.steps(2)
        the_loss(loop.model(torch.randn(BATCH, 8))).backward()
        assert all(p.grad is None for p in loop.model.parameters()), "each was used and freed"
        loop.optimizer.step()
        loop.scheduler.step()
        loop.steps(1)
    action.verify_undone(loop.job, before)
    loop.steps(2)
    alone = Loop(kind)
    alone.steps(8)
    assert loop.outcome() == alone.outcome()


def clip(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def clamp(loop: Loop) -> None:
    """As scripts do it that are older than `torch.no_grad`."""
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-1e-3, 1e-3)


def warm_up(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.9


@pytest.mark.parametrize(
    ("between", "passes", "reason"),
    [
        (clip, 1, "as by clipping"),
        (clamp, 1, "as by clipping"),
        (None, 2, "several backward passes"),
        (warm_up, 1, "settings are changed"),
    ],
)
def test_gradients_that_are_not_ready_keep_the_step_where_it_is(
    between: Any, passes: int, reason: str
) -> None:
    loop = Loop(between=between, passes=passes)
    action = OptimizerInBackward()
    with action.apply(loop.job, None):
        loop.steps(6)
    alone = Loop(between=between, passes=passes)
    alone.steps(6)
    assert loop.outcome() == alone.outcome()
    with pytest.raises(CannotApply, match=reason), action.apply(loop.job, None):
        pass


@pytest.mark.parametrize(("fused", "reason"), [(False, "as by clipping"), (True, "GradScaler")])
def test_scaled_gradients_keep_the_step_where_it_is(fused: bool, reason: str) -> None:
    def loop() -> Loop:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        return Loop(partial(torch.optim.AdamW, fused=fused), scaler=scaler)

    scaled, action = loop(), OptimizerInBackward()
    with action.apply(scaled.job, None):
        scaled.steps(6)
    alone = loop()
    alone.steps(6)
    assert scaled.outcome() == alone.outcome()
    with pytest.raises(CannotApply, match=reason), action.apply(scaled.job, None):
        pass
