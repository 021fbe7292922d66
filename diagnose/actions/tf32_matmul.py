"""Matrix products of float32 in TF32"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

TENSOR_CORES = (8, 0)
"""The first compute capability whose tensor cores know TF32."""


class Tf32Matmul(Action):
    """
    ## What it does
    Sets `torch.set_float32_matmul_precision("high")`. Products keep the range of float32 but about three
    decimal digits; sums stay in float32.

    ## When it takes effect
    At the next product.

    ## When it cannot help
    A model whose products are in bf16 or fp16 already, a GPU older than Ampere, a CPU.

    ## Hazards
    Code between the products that relies on float32's precision, such as a matrix inverse, loses it too.
    Compiled graphs are compiled again.

    ## What was measured
    On an H200, of a GPT of four layers with fourteen other processes beside it: 1.04x, which could not be
    told from 1x. What it wins alone is not known.
    """

    safety = Safety.PRECISION
    order = 40
    touches = "model"

    def check(self, job: Job) -> None:
        if job.device != "cuda":
            raise CannotApply("TF32 is a format of NVIDIA's GPUs; the model is on another device")
        if torch.version.hip or torch.cuda.get_device_capability(job.torch_device) < TENSOR_CORES:
            raise CannotApply("this GPU does not know TF32")
        if all(p.dtype is not torch.float32 for model in job.models for p in model.parameters()):
            raise CannotApply("no parameter is float32")
        precision()

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        precision()
        with float32_products("high"):
            yield

    def state(self, job: Job) -> Any:
        try:
            return torch.get_float32_matmul_precision(), [now for _, now in _kinds()]
        except RuntimeError as error:  # the script uses the settings that have replaced this one
            return str(error)

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"statement": 'torch.set_float32_matmul_precision("high")'}


@contextmanager
def float32_products(wanted: str) -> Iterator[None]:
    """Sets the precision of float32 products inside, and afterwards all that it was set by before.

    Args:
        wanted: As `torch.set_float32_matmul_precision` takes it.
    """
    before, kinds = torch.get_float32_matmul_precision(), _kinds()
    try:
        torch.set_float32_matmul_precision(wanted)
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for kind, was in kinds:
            if was == "none":  # it follows what is set for all; the older setting says "ieee" now
                kind.fp32_precision = was


def _kinds() -> list[tuple[Any, str]]:
    """What torch 2.9 and later keep the precision in beside the older setting, and what it says there."""
    kinds: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [(kind, kind.fp32_precision) for kind in kinds if hasattr(kind, "fp32_precision")]


def precision() -> None:
    """Makes sure that the precision that is set can be lowered.

    Raises:
        CannotApply: If it cannot.
    """
    try:
        before: str = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        raise CannotApply("the script sets the precision of single kinds of product") from error
    if before != "highest":
        raise CannotApply(f"the precision of float32 products is {before!r} already")
