"""Gradients travel in fp16, multiplied by a fixed factor"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import distributed

from diagnose.actions._ddp import TORCHS, GradientHook, Reduce
from diagnose.actions._ddp_rounds import InRounds
from diagnose.core.trial import Safety

FACTOR = 2.0**10
"""A power of two, which rounds nothing. Averages up to 64 fit, and down to 6e-8 keep all their digits."""


class DdpFp16Hook(GradientHook):
    """
    ## What it does
    Gives DDP a fresh reducer with a communication hook that sends each bucket in fp16, multiplied by 1024:
    half the bytes, and eight times finer than bfloat16. A bucket that does not fit into fp16, on any rank
    or in the sum, comes out infinite on all of them, and is sent once more in float32: no gradient is ever
    cut off or lost, and what is infinite in the script itself stays so, for its `GradScaler` to find.

    ## When it takes effect
    With the next step.

    ## When it cannot help
    A link with bandwidth to spare, such as between processes of one machine. Gradients that overflow often:
    they are sent twice. No rule asks for it, because `ddp-bf16-hook` sends as little: name it with
    `--only`.

    ## Hazards
    Averages below 6e-8 lose digits, and those below 6e-11 are lost: `ddp-fp16-scaled-hook` follows the
    gradients. Whether all fitted is asked at the end of each backward pass: on a GPU the host waits for
    that once a bucket.
    """

    safety = Safety.PRECISION
    torchs = f"None, {TORCHS}.default_hooks.fp16_compress_hook"  # which multiplies nothing

    def reduce(self, model: Any, prepared: Any) -> Reduce:
        return InRounds("averaged_in_fp16", averaged, at_the_end=True)


def averaged(group: Any, bucket: Any) -> Generator[list[Any], None, None]:
    """See `actions._ddp_rounds.Exchange`. Every rank gets the same sum, and so repeats it or does not."""
    whole_N = bucket.buffer().div_(group.size())
    sent_N = (whole_N * FACTOR).half()
    yield [distributed.all_reduce(sent_N, group=group, async_op=True)]
    if torch.isfinite(sent_N).all():
        whole_N.copy_(sent_N).div_(FACTOR)
    else:
        yield [distributed.all_reduce(whole_N, group=group, async_op=True)]
