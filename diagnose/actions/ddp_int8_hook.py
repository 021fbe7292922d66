"""Gradients travel in one byte each"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from diagnose.actions._ddp import GradientHook, Reduce, wrapped
from diagnose.actions._ddp_rounds import InRounds, gathering
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

BLOCK = 512
"""Gradients that share a scale. Layers of one bucket differ a hundredfold, so that one scale for all of it
would round the smaller ones to nothing; the scales of blocks are 1 % of what is sent."""

LARGEST = 127.0
"""Of one byte, with a sign."""

BACKENDS = ("gloo", "nccl")
"""Those that let every rank send every other one something else."""


class DdpInt8Hook(GradientHook):
    """
    ## What it does
    Gives DDP a fresh reducer with a communication hook that sends gradients as whole numbers of one byte,
    with a scale for every 512: about a quarter of the bytes. Each rank gets its share of the gradients from
    all others, averages it in float32, and sends the average, again in bytes, to all.

    ## When it takes effect
    With the next step.

    ## When it cannot help
    A link with bandwidth to spare. Many small buckets: each is sent in two parts, one after the other.

    ## Hazards
    Each gradient is rounded twice, by up to a 254th of the largest in its 512; smaller ones are lost. What
    the rounding leaves is not made good later. Training takes another way, hence `--allow training`, and
    the loss is watched. All ranks get the same bytes, so that their weights stay the same. What is not
    finite stays so, and takes its 512 with it.
    """

    safety = Safety.TRAINING

    def check(self, job: Job) -> None:
        super().check(job)
        for model in wrapped(job):
            backend = distributed.get_backend(model.process_group)
            if backend not in BACKENDS:
                raise CannotApply(f"shares can be sent over {' and '.join(BACKENDS)}; this is {backend}")

    def reduce(self, model: Any, prepared: Any) -> Reduce:
        return InRounds("averaged_in_int8", averaged)


def averaged(group: Any, bucket: Any) -> Generator[list[Any], None, None]:
    """See `actions._ddp_rounds.Exchange`.

    Axes: R ranks, B blocks of a rank's share, K gradients of a block.
    """
    whole_N, num_ranks = bucket.buffer(), group.size()
    missing = -whole_N.numel() % (num_ranks * BLOCK)
    coded = _coded(functional.pad(whole_N, (0, missing)).view(num_ranks, -1, BLOCK))
    theirs = [torch.empty_like(part) for part in coded]
    yield [
        distributed.all_to_all_single(into, part, group=group, async_op=True)
        for into, part in zip(theirs, coded, strict=True)
    ]
    coded = _coded(_decoded(*theirs).sum(0).div_(num_ranks))
    whole = [part.new_empty(num_ranks * part.shape[0], part.shape[1]) for part in coded]
    yield [gathering(into, part, group) for into, part in zip(whole, coded, strict=True)]
    whole_N.copy_(_decoded(*whole).view(-1)[: whole_N.numel()])


def _coded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bytes, and a scale for each row of the last axis: infinite or no number where one of the row
    is, which makes all of it no number."""
    scales = values.abs().amax(-1, keepdim=True).div_(LARGEST)
    codes = (values / torch.where(scales > 0, scales, 1.0)).round_()
    return codes.nan_to_num_(0.0).clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def _decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes * scales
