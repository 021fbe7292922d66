"""Gradients travel in buckets of another size"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diagnose.actions._ddp import ReducerAction, gradient_bytes, wrapped
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

MIB = 1 << 20
SIZES_MIB = (1, 5, 25, 100)
DEFAULT_MIB = 25
"""Of torch, which then makes the first bucket smaller."""


class DdpBucketSize(ReducerAction):
    """
    ## What it does
    Gives DDP a fresh reducer whose buckets hold 1, 5, 25 or 100 MiB, whichever is fastest. Larger ones pay
    the fixed cost of a reduction less often, smaller ones begin to be sent earlier in the backward pass.

    ## When it takes effect
    With the next step. In the second one torch orders the buckets anew, as it does when a script starts.

    ## When it cannot help
    A model whose gradients fit into one bucket. A link that is busy all the time.

    ## Hazards
    All ranks must change at the same step, and do. With three ranks and more, an element's place in its
    bucket decides in which order the ranks are summed, so that the last bit of a gradient may differ; with
    two it does not. On a GPU the new buckets need memory before the old ones are free.
    """

    safety = Safety.ROUNDING
    touches = "ranks"

    def check(self, job: Job) -> None:
        for model in wrapped(job):
            if vars(model).get("bucket_bytes_cap_list"):
                raise CannotApply("the script has chosen the size of each bucket (bucket_cap_mb_list)")

    def values(self, job: Job) -> Sequence[int | None]:
        """See `Action.values`: sizes that make another number of buckets than the present one."""
        models = wrapped(job)
        gradients = max(map(gradient_bytes, models))
        known = {_num_buckets(gradients, max(model.bucket_bytes_cap for model in models))}
        values = []
        for size in SIZES_MIB:
            num = _num_buckets(gradients, size * MIB)
            if num not in known:
                known.add(num)
                values.append(size)
        return values

    def change(self, model: Any, prepared: Any) -> None:
        wish = None if prepared == DEFAULT_MIB else prepared
        if hasattr(model, "_bucket_config"):  # torch 2.13
            model._bucket_config = type(model._bucket_config).create(
                bucket_cap_mb=wish, bucket_cap_mb_list=None, use_python_reducer=False
            )
        model.bucket_bytes_cap = prepared * MIB
        model.bucket_bytes_cap_default = wish is None

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"DistributedDataParallel.bucket_cap_mb": str(value)}


def _num_buckets(gradients_bytes: int, cap_bytes: int) -> int:
    return -(-gradients_bytes // max(cap_bytes, 1))
