"""Only the largest hundredth of the gradients travels; the rest is kept for later"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from diagnose.actions._ddp import GradientHook, Reduce, in_float32
from diagnose.actions._ddp_rounds import InRounds, gathering
from diagnose.actions._ddp_unsent import Unsent
from diagnose.core.job import Job
from diagnose.core.trial import Safety

ONE_IN = 100
"""As published for training with what is left over kept (deep gradient compression goes to 1000)."""


class DdpTopKHook(GradientHook):
    """
    ## What it does
    Gives DDP a fresh reducer with a communication hook that sends, of each bucket, the hundredth of the
    gradients that is largest, with their places. What is not sent is added to the gradients of the next
    step, and so goes sooner or later. Between two ranks that is a 50th of the bytes, between eight a 12th.

    ## When it takes effect
    With the next step.

    ## When it cannot help
    A link that is no bottleneck: finding the largest takes longer than a copy. Many ranks: each gets what
    every other one has chosen.

    ## Hazards
    Most gradients come many steps late, which momentum and a decaying learning rate feel. It is another way
    of training: never tried unless you name it, with `--only ddp-top-k-hook --allow training`. What has not
    been sent is kept while the trial switches it off, and is lost when it is taken out. It takes memory for
    all gradients once more. Where a `GradScaler` changes its factor, what is left of the steps before keeps
    the old one.
    """

    safety = Safety.TRAINING
    copies = 1

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        yield WeakKeyDictionary({model: Unsent() for model in in_float32(job)})

    def reduce(self, model: Any, prepared: Any) -> Reduce:
        return InRounds("averaged_largest", partial(averaged, prepared.setdefault(model, Unsent())))


def averaged(unsent: Unsent, group: Any, bucket: Any) -> Generator[list[Any], None, None]:
    """See `actions._ddp_rounds.Exchange`. Axes: K chosen places, R ranks."""
    whole_N, num_ranks = bucket.buffer().div_(group.size()), group.size()
    unsent.add_to(bucket)
    num_chosen = -(-whole_N.numel() // ONE_IN)
    place_K = whole_N.abs().topk(num_chosen, sorted=False).indices
    chosen = [whole_N[place_K], place_K.to(torch.int32)]
    unsent.keep(bucket, whole_N.index_fill(0, place_K, 0.0))
    gathered = [part.new_empty(num_ranks * num_chosen) for part in chosen]
    yield [gathering(into, part, group) for into, part in zip(gathered, chosen, strict=True)]
    values, places = (part.view(num_ranks, num_chosen) for part in gathered)
    whole_N.zero_()
    for rank in range(num_ranks):  # one after the other: all ranks add in the same order
        whole_N.index_add_(0, places[rank].to(torch.int64), values[rank])
