"""Other kernels for attention"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

KINDS = ("flash", "mem_efficient", "math", "cudnn")
"""As `torch.backends.cuda` calls them: `flash_sdp_enabled()`, `enable_flash_sdp(on)`."""

CUDNN = int(SDPBackend.CUDNN_ATTENTION.value)

CUDNN_FIRST = 1
"""The value that asks cuDNN first; `None` leaves the order as it is."""


class Sdpa(Action):
    """
    ## What it does
    `scaled_dot_product_attention` takes the first kernel that is allowed and can do what is asked. This
    allows all of them again where the script has forbidden some, and tries whether cuDNN's, asked first, is
    faster than flash attention.

    ## When it takes effect
    At the next call of attention.

    ## When it cannot help
    Attention that the model writes out itself: only a change of its source can. A CPU has one fused kernel,
    flash attention: there is something to do only where the script has forbidden it.

    ## Hazards
    Kernels round differently. A script may have forbidden one because it is wrong for its inputs.

    ## What was measured
    Nothing yet: on the one GPU that has run this, an H200, it was refused, as all kernels were allowed.
    """

    safety = Safety.ROUNDING
    touches = "model"

    def check(self, job: Job) -> None:
        if torch.are_deterministic_algorithms_enabled():
            raise CannotApply("the script asks for deterministic algorithms")
        if not self.values(job):
            raise CannotApply("all kernels are allowed, and there is no other order to try")

    def values(self, job: Job) -> Sequence[int | None]:
        order = _order()
        allowed = dict(zip(KINDS, _allowed(), strict=True))
        choices: list[int | None] = []
        if not all(allowed.values()) if job.device == "cuda" else not allowed["flash"]:
            choices.append(None)
        if job.device == "cuda" and torch.backends.cudnn.is_available() and order[0] != CUDNN:
            choices.append(CUDNN_FIRST)
        return choices

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        before, order = _allowed(), _order()
        try:
            for kind in KINDS:
                getattr(torch.backends.cuda, f"enable_{kind}_sdp")(True)
            if prepared == CUDNN_FIRST:
                torch._C._set_sdp_priority_order([CUDNN, *(kernel for kernel in order if kernel != CUDNN)])
            yield
        finally:
            torch._C._set_sdp_priority_order(order)
            for kind, on in zip(KINDS, before, strict=True):
                getattr(torch.backends.cuda, f"enable_{kind}_sdp")(on)

    def state(self, job: Job) -> Any:
        get = getattr(torch._C, "_get_sdp_priority_order", list)
        return _allowed(), get()

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        forbidden = [kind for kind, on in zip(KINDS, _allowed(), strict=True) if not on]
        if value is not None or not forbidden:
            return {}
        calls = [f"torch.backends.cuda.enable_{kind}_sdp(True)" for kind in forbidden]
        return {"statement": "; ".join(calls)}


def _allowed() -> list[bool]:
    return [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in KINDS]


def _order() -> list[int]:
    """Returns the order in which kernels are asked.

    Raises:
        CannotApply: If this torch has none.
    """
    for name in ("_get_sdp_priority_order", "_set_sdp_priority_order"):
        if not hasattr(torch._C, name):
            raise CannotApply(f"this torch has no torch._C.{name}")
    return torch._C._get_sdp_priority_order()
