"""Gradients travel in bfloat16"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from diagnose.actions._ddp import TORCHS, GradientHook, Reduce
from diagnose.core.job import Job
from diagnose.core.trial import Safety


class DdpBf16Hook(GradientHook):
    """
    ## What it does
    Gives DDP a fresh reducer with a communication hook that sends each bucket in bfloat16: half the bytes.
    The sum over the ranks is made in bfloat16, too; parameters and the optimizer stay in float32.

    ## When it takes effect
    With the next step.

    ## When it cannot help
    A link with bandwidth to spare, such as between processes of one machine: there the conversion costs
    more than the bytes. Gradients that are sent while others are still computed.

    ## Hazards
    Gradients keep three decimal digits, and small ones of many ranks may be lost in the sum. All ranks get
    the same result, so that their weights stay the same.
    """

    safety = Safety.PRECISION
    torchs = f"None, {TORCHS}.default_hooks.bf16_compress_hook"

    def reduce(self, model: Any, prepared: Any) -> Reduce:
        return averaged_in_bf16

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        if job.device == "cpu":
            return {}  # torch's own wants NCCL: what is ours can be put in force by --apply
        return super().settings(job, value)


def averaged_in_bf16(group: Any, bucket: Any) -> Any:
    """A communication hook. torch's own refuses CPUs by name."""
    whole_N = bucket.buffer()
    sent_N = whole_N.to(torch.bfloat16).div_(group.size())
    sent = distributed.all_reduce(sent_N, group=group, async_op=True)
    assert sent is not None

    def received(future: Any) -> torch.Tensor:
        averaged: torch.Tensor = whole_N.copy_(future.value()[0])
        return averaged

    return sent.get_future().then(received)
