"""The check of gradients on a GPU: a layout that rounds otherwise passes, a changed weight does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from diagnose.actions._shadow import compare_gradients
from diagnose.actions._watch import watched
from diagnose.actions.channels_last import ChannelsLast
from diagnose.core.job import Job
from diagnose.core.trial import Safety


def called(place: torch.device, channels: int) -> Job:
    """A network of convolutions whose latest call is known."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * channels, 2 * channels, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 10),
    ).to(place)
    image = torch.randn(32, 3, 32, 32, device=place)
    return Job(models=[model], inputs={id(model): ((image,), {})}, device=place.type)


@contextmanager
def scaled(weight: torch.Tensor, by: float) -> Iterator[None]:
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(by)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize("channels", [8, 64])
@pytest.mark.parametrize("tf32", [True, False])
def test_the_layout_of_channels_last_is_rounding_with_tf32_and_without(
    place: torch.device, tf32: bool, channels: int
) -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        job, action = called(place, channels), ChannelsLast()
        action.check(job)
        with watched(job), action.prepare(job, None) as prepared:
            verdict = compare_gradients(job, action.apply(job, prepared), action.safety)
            print(f"{channels} channels, TF32 {tf32}: {verdict.reason}")
            assert verdict.ok, verdict.reason
            head = job.models[0][-1].weight
            # Of TF32's rounding the outputs show least: gradients move by per cents.
            changed = compare_gradients(job, scaled(head, 1.1 if tf32 else 1.01), Safety.ROUNDING)
            print(f"a changed weight: {changed.reason}")
            assert not changed.ok
