"""Channels last: weights converted under a running script, and back."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._shadow import compare_gradients
from diagnose.actions.base import CannotApply
from diagnose.actions.channels_last import ChannelsLast, refuse_flattened
from diagnose.actions.fused_optimizer import FusedOptimizer
from diagnose.core.job import Job
from tests.toggled import ConvNet, abba, always, assert_close, assert_equal, images, train, tuned, weights

LAST = torch.channels_last


def made(**options: Any) -> tuple[ConvNet, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ConvNet()
    # eps: Adam makes large steps of gradients that are hardly more than rounding
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, **options)


def run(action: Any, on: Callable[[int], bool] = abba, **options: Any) -> list[torch.Tensor]:
    model, optimizer = made(**options)
    with tuned(action, on=on):
        train(model, optimizer, images())
    return weights(model)


@pytest.mark.parametrize("on", [abba, always])
@pytest.mark.parametrize("fused", [False, True])
def test_switched_on_and_off_it_trains_as_the_script_does_alone(
    on: Callable[[int], bool], fused: bool
) -> None:
    """With a fused optimizer, too, which computes garbage where a state lies otherwise than its weight."""
    assert_close(run(ChannelsLast(), on, fused=fused), run(None, fused=fused))


def test_it_gets_on_with_the_fused_optimizer_put_in_force_besides() -> None:
    model, optimizer = made()
    with tuned(ChannelsLast()) as live:
        assert live is not None
        fused = FusedOptimizer().apply(Job(models=[model], optimizers=[optimizer]), [])
        live.at = {5: fused.__enter__, 9: lambda: fused.__exit__(None, None, None)}
        train(model, optimizer, images())
    assert_close(weights(model), run(None))


class Followed(ConvNet):
    """With a convolution that follows another one, as a momentum encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Conv2d(3, 8, 3, padding=1, bias=False).requires_grad_(False)

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        return super().forward(image_NCHW) + self.slow(image_NCHW).mean()

    def follow(self, step: int) -> None:
        self.slow.weight.data = self.slow.weight.data * 0.9 + self.body[0].weight.data * 0.1


def test_a_script_that_binds_the_data_of_a_weight_anew_trains_as_it_does_alone() -> None:
    ends = []
    for action in (None, ChannelsLast()):
        torch.manual_seed(0)
        model = Followed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        with tuned(action):
            train(model, optimizer, images(), each=model.follow)
        ends.append(weights(model))
    assert_close(ends[1], ends[0])


def test_there_and_back_keeps_every_bit_object_and_address() -> None:
    model, optimizer = made()
    train(model, optimizer, images(12))
    job = Job(models=[model], optimizers=[optimizer])
    weight = model.body[0].weight
    address, momentum = weight.data_ptr(), optimizer.state[weight]["exp_avg"]
    before, momentum_before = weights(model), momentum.clone()
    with ChannelsLast().apply(job, _prepared(job)):
        assert weight.is_contiguous(memory_format=LAST) and momentum.is_contiguous(memory_format=LAST)
        assert_equal(weights(model), before)
    assert weight is model.body[0].weight and weight.data_ptr() == address
    assert weight.is_contiguous() and momentum.is_contiguous()
    assert optimizer.state[weight]["exp_avg"] is momentum
    assert_equal([*weights(model), momentum], [*before, momentum_before])


def test_what_an_optimizer_keeps_that_was_made_meanwhile_lies_afterwards_as_its_weights_do() -> None:
    """A fused step of torch's would compute garbage with another order."""
    model, optimizer = made()
    train(model, optimizer, images(8))
    job = Job(models=[model], optimizers=[optimizer])
    with ChannelsLast().apply(job, _prepared(job)):
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, images(8))
        job.optimizers = [optimizer]
    kept = [(p, optimizer.state[p]["exp_avg"]) for p in model.parameters()]
    assert all(moment.stride() == p.stride() for p, moment in kept)


def _prepared(job: Job) -> Any:
    return ChannelsLast().prepare(job, None).__enter__()


def test_convolutions_compute_in_the_layout_and_the_script_gets_the_usual_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    seen: list[bool] = []
    model[1].register_forward_hook(
        lambda module, args, output: seen.append(output.is_contiguous(memory_format=LAST))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tuned(ChannelsLast(), on=always) as live:
        for image, _ in images():
            output = model(image)
            output.view(4, -1).sum().backward()
            optimizer.step()
    assert live is not None
    assert seen == [False] * 3 + [True] * (len(seen) - 3)


def test_an_evaluation_gets_the_usual_layout_too() -> None:
    """The weights are converted for it as well, and `view` is the script's."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with tuned(ChannelsLast(), on=always) as live:
        for image, _ in images():
            model.train()
            model(image).view(4, -1).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(image).view(4, -1).sum()
                model.eval()
                model(image).view(4, -1).sum()
            seen.append(model[0].weight.is_contiguous(memory_format=LAST))
    assert live is not None
    assert seen[-1]


def test_safetensors_save_what_they_would_without_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = made()
    with tuned(ChannelsLast(), on=always) as live:

        def each(step: int) -> None:
            safetensors.save_file(model.state_dict(), tmp_path / f"{step}.safetensors")

        train(model, optimizer, images(), each=each)
    assert live is not None
    last = safetensors.load_file(max(tmp_path.iterdir(), key=lambda path: int(path.stem)))
    assert all(value.is_contiguous() for value in last.values())


VIEW = ".view("  # apart, as this file is one of those that are looked at


@pytest.mark.parametrize("file", ["__main__", "engine"])
@pytest.mark.parametrize(
    "text",
    [
        f"norm = torch.cat([p.grad{VIEW}-1) for p in model.parameters()]).norm()",
        f"norm += p{VIEW}-1).norm()",
        f"flat = torch.cat([p.grad.detach(){VIEW}-1) for p in parameters])",
        f"w = w{VIEW}w.size(0), -1)",
        "from torch.nn.utils import " + "prune",
    ],
)
def test_a_script_that_flattens_weights_is_left_alone(
    text: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{text}\n")
    monkeypatch.setitem(sys.modules, file, sys.modules.get(file, ModuleType(file)))
    monkeypatch.setattr(sys.modules[file], "__file__", str(script), raising=False)
    with pytest.raises(CannotApply, match="flattens weights or gradients: "):
        refuse_flattened()


def test_a_script_may_view_what_the_model_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    lines = ["x.view(x.size(0), -1)", "correct[:k].view(-1)", "target.view(1, -1)", "logits.view(-1, 10)"]
    script.write_text("\n".join(lines))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    refuse_flattened()


class Flat(torch.optim.SGD):
    """An optimizer of another package."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Flat])
def test_an_optimizer_that_may_flatten_gradients_is_left_alone(kind: Any) -> None:
    model = ConvNet()
    job = Job(models=[model], optimizers=[kind(model.parameters(), lr=0.1)])
    with pytest.raises(CannotApply, match=f"{kind.__name__} may flatten weights or gradients"):
        ChannelsLast().check(job)


def test_a_checkpoint_saved_while_it_is_on_resumes_a_plain_fused_script() -> None:
    """Torch's fused step does not look at strides: what is saved must lie as the plain script's weights."""
    ends = []
    for action in (None, ChannelsLast()):
        model, optimizer = made(fused=True)
        saved: dict[str, Any] = {}

        def each(
            step: int, saved: dict[str, Any] = saved, model: Any = model, opt: Any = optimizer
        ) -> None:
            if step == 7:
                saved.update(copy.deepcopy({"model": model.state_dict(), "optimizer": opt.state_dict()}))

        with tuned(action, on=always):
            train(model, optimizer, images(), each=each)
        resumed, other = made(fused=True)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        torch.manual_seed(1)
        train(resumed, other, images(16))
        ends.append(weights(resumed))
    assert_close(ends[1], ends[0])


def test_a_checkpoint_loaded_while_it_is_on_goes_on_right() -> None:
    ends = []
    for action in (None, ChannelsLast()):
        model, optimizer = made(fused=True)
        start = copy.deepcopy(optimizer.state_dict())

        def each(step: int, opt: Any = optimizer, saved: Any = start) -> None:
            if step == 4:
                saved.update(copy.deepcopy(opt.state_dict()))
            if step == 8:
                opt.load_state_dict(saved)

        with tuned(action, on=always):
            train(model, optimizer, images(), each=each)
        ends.append(weights(model))
    assert_close(ends[1], ends[0])


def test_copies_pickles_and_averages_of_the_model_made_while_it_is_on_stand_alone() -> None:
    torch.manual_seed(0)
    model, optimizer = made()
    average = torch.optim.swa_utils.AveragedModel(model)
    twins: list[nn.Module] = []

    def each(step: int) -> None:
        average.update_parameters(model)
        if step == 6:
            twins.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])

    with tuned(ChannelsLast(), on=always):
        train(model, optimizer, images(), each=each)
    image = torch.randn(2, 3, 8, 8)
    one, other = (twin.eval()(image) for twin in twins)
    assert torch.equal(one, other)
    assert not torch.equal(one, model.eval()(image)), "the model went on to train"
    assert torch.isfinite(average.eval()(image)).all()


def test_a_scheduler_and_clipping_work_as_without() -> None:
    ends = []
    for action in (None, ChannelsLast()):
        model, optimizer = made()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        norms = []
        with tuned(action):
            for image, label in images():
                nn.functional.cross_entropy(model(image), label).backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=False)
        ends.append([*weights(model), torch.stack(norms)])
    assert_close(ends[1], ends[0])


class Views(nn.Module):
    """Fails on an image in the other layout, after it has drawn and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 8 * 8, 2)

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        image_NCHW = nn.functional.dropout(self.norm(self.conv(image_NCHW)), 0.1)
        return self.head(image_NCHW.view(len(image_NCHW), -1))


def test_a_model_that_cannot_do_it_trains_bit_for_bit_as_alone_and_it_is_not_tried_again() -> None:
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        model = Views()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = Job(models=[model], optimizers=[optimizer])
        action, failure = ChannelsLast(), _prepared(job)
        before = action.state(job)
        context = action.apply(job, failure)
        if on:
            context.__enter__()
        for image, label in images(16):
            call: Any = type(model).__call__
            for route in job.routes.get(id(model), []):
                call = lambda *args, route=route, **kwargs: route(type(model).__call__, args, kwargs)  # noqa: B023, E731
            nn.functional.cross_entropy(call(model, image), label).backward()
            optimizer.step()
            optimizer.zero_grad()
        if on:
            context.__exit__(None, None, None)
            with pytest.raises(CannotApply, match="view size"), action.apply(job, failure):
                pass
        action.verify_undone(job, before)
        ends.append(weights(model))
    assert_equal(ends[1], ends[0])


@pytest.mark.parametrize("on_images", [False, True])
def test_the_numerics_check_refuses_dropout_on_images_and_no_other(on_images: bool) -> None:
    """Torch draws the mask in the order of memory."""
    layers = [nn.Dropout(0.5), nn.Flatten()] if on_images else [nn.Flatten(), nn.Dropout(0.5)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.Linear(4 * 6 * 6, 2))
    job = Job(models=[model], inputs={id(model): ((torch.randn(4, 3, 8, 8),), {})})
    action = ChannelsLast()
    before = action.state(job)
    verdict = compare_gradients(job, action.apply(job, _prepared(job)), action.safety)
    assert verdict.ok is not on_images, verdict.reason
    action.verify_undone(job, before)


def shared(model: nn.Module) -> object:
    return model.share_memory()


def in_a_buffer(model: Any) -> None:
    buffer = torch.zeros(1000)
    weight = model.body[0].weight
    weight.data = buffer[: weight.numel()].view_as(weight)


@pytest.mark.parametrize(
    "prepare, reason",
    [
        (lambda model: model.state_dict(), "alias"),
        (shared, "share"),
        (in_a_buffer, "large buffer"),
        (lambda model: model.to(memory_format=LAST), "already"),
        (lambda model: model.compile(backend="eager"), "compiles"),
    ],
)
def test_it_refuses_weights_that_others_see(prepare: Callable[[Any], object], reason: str) -> None:
    model = ConvNet()
    held = prepare(model)
    with pytest.raises(CannotApply, match=reason):
        ChannelsLast().check(Job(models=[model]))
    del held


def test_it_refuses_a_model_without_images() -> None:
    with pytest.raises(CannotApply, match="no model has a two-dimensional convolution"):
        ChannelsLast().check(Job(models=[nn.Linear(2, 2)]))
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())
    with pytest.raises(CannotApply, match="no image"):
        ChannelsLast().check(Job(models=[model], inputs={id(model): ((torch.zeros(3),), {})}))


def test_a_weight_left_converted_is_noticed() -> None:
    model, optimizer = made()
    action, job = ChannelsLast(), Job(models=[model], optimizers=[optimizer])
    before = action.state(job)
    model.body[0].weight.data = model.body[0].weight.data.to(memory_format=LAST)
    with pytest.raises(RuntimeError, match="was not undone"):
        action.verify_undone(job, before)
