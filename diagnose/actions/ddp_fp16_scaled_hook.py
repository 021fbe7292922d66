"""Gradients travel in fp16, each bucket multiplied by what just fits"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp

from diagnose.actions._ddp import TORCHS, GradientHook, Reduce
from diagnose.actions._ddp_rounds import InRounds
from diagnose.core.trial import Safety

TOP = 15
"""Every sum stays below 2 to this: fp16 ends at nearly twice as much, which leaves room for rounding."""

MOST = 100
"""The largest power of two to multiply with: its inverse is a normal float32, too."""


class DdpFp16ScaledHook(GradientHook):
    """
    ## What it does
    Gives DDP a fresh reducer with a communication hook that sends each bucket in fp16, at half the bytes.
    Before that the ranks agree on its largest gradient, in a message of four bytes, and multiply it with
    the power of two that brings it just below what the sum in fp16 can hold. So nothing overflows, however
    the gradients change; those down to a billionth of the largest keep three digits or more.

    ## When it takes effect
    With the next step.

    ## When it cannot help
    A link with bandwidth to spare. One with a long way to go: each bucket makes it twice. No rule asks for
    it, because `ddp-bf16-hook` sends as little; name it with `--only`.

    ## Hazards
    A gradient is rounded to 11 binary digits before the sum is made, and after. What is not finite stays
    so, for the script's `GradScaler` to find.
    """

    safety = Safety.PRECISION
    torchs = f"None, {TORCHS}.default_hooks.fp16_compress_hook"  # which multiplies nothing

    def reduce(self, model: Any, prepared: Any) -> Reduce:
        return InRounds("averaged_in_scaled_fp16", averaged)


def averaged(group: Any, bucket: Any) -> Generator[list[Any], None, None]:
    """See `actions._ddp_rounds.Exchange`. The host never looks at a number."""
    whole_N = bucket.buffer()
    largest = whole_N.abs().amax()
    yield [distributed.all_reduce(largest, op=ReduceOp.MAX, group=group, async_op=True)]
    factor = _just_fitting(largest)
    sent_N = (whole_N.div_(group.size()) * factor).half()
    yield [distributed.all_reduce(sent_N, group=group, async_op=True)]
    whole_N.copy_(sent_N).div_(factor)


def _just_fitting(largest: torch.Tensor) -> torch.Tensor:
    """Returns the power of two; 1 where the step is lost anyway."""
    _, exponent = torch.frexp(largest)  # 2 to this is more
    factor = torch.ldexp(torch.ones_like(largest), (TOP - exponent).clamp(-MOST, MOST))
    return torch.where(torch.isfinite(largest), factor, 1.0)
