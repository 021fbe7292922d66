"""Clipping and unscaling of gradients by kernels, wherever the script does it.

`clip_grad_norm_` looks its two halves up in its module when it is called, so that replacing them reaches
every script, also one that imported the function long before. What does not fit goes to torch's own halves.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from diagnose.kernels._gradients import Gradients, GradientTables
from diagnose.kernels._table import TORCH_EPSILON
from torch.amp import grad_scaler
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grad

from diagnose.hooks.base import replaced

if TYPE_CHECKING:
    from diagnose.kernels._swap import Swap

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")


@dataclass(slots=True, kw_only=True)
class Pending:
    """What a step has still to do to gradients that the script takes for clipped or unscaled.

    Attributes:
        grads: The gradients. Others may take their addresses when a script drops them without a step.
        places: Address of each when this was noted.
        versions: Counts of changes to each.
        coef: What they are to be multiplied by.
        grad_scale: What they are to be divided by first.
        outcome_4: Of the kernel that measured them.
        max_norm: To what the factor in it clips.
    """

    grads: list[weakref.ref[torch.Tensor]]
    places: list[int]
    versions: list[int]
    coef: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None
    outcome_4: torch.Tensor
    max_norm: float

    def is_of(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether these are its gradients."""
        found = list(map(weakref.ref, grads))  # a tensor has one, as long as it lives
        return len(found) == len(self.grads) and (
            all(map(is_, found, self.grads)) or set(map(id, found)) == set(map(id, self.grads))
        )

    def is_untouched(self) -> bool:
        """Whether nobody has changed its gradients, which are all there."""
        grads: Any = list(map(weakref.ref.__call__, self.grads))
        return self.versions == versions(grads) and self.places == places(grads)

    def carry_out(self, grads: Sequence[torch.Tensor]) -> None:
        """Does it in memory."""
        for grad in grads:
            if self.grad_scale is not None:
                grad.mul_(self.grad_scale.double().reciprocal().float())
            if self.coef is not None:
                grad.mul_(self.coef)


def places(grads: Sequence[torch.Tensor]) -> list[int]:
    """The address of each tensor."""
    return list(map(torch.Tensor.data_ptr, grads))


def versions(grads: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was changed."""
    return list(map(_VERSION, grads))


@dataclass(slots=True, kw_only=True)
class Measured:
    """A norm that was given to the script, in its first version, with what it was measured of, and the swap
    whose step is to clip by it, if one is."""

    norm: torch.Tensor
    version: int
    outcome_4: torch.Tensor
    grads: Gradients
    max_norm: float
    defers: weakref.ref[Swap] | None


class _Looking(threading.local):
    """Whether a `GradScaler` only looks for infinities now, in this thread: before a step that unscales.
    Its `allow_fp16` does not tell, which subclasses set in order to unscale gradients in fp16."""

    now = False


class Clipping:
    """The replaced functions of torch, in place while there is a swap that asks for it."""

    def __init__(self) -> None:
        self.swaps: weakref.WeakSet[Swap] = weakref.WeakSet()
        self._ends: dict[int, Any] = {}
        self._patches = ExitStack()
        self._tables = GradientTables()
        self._last: Measured | None = None
        self._max_norm = math.inf
        self._looking = _Looking()

    def add(self, swap: Swap) -> None:
        """Clips for a swap from now on."""
        if not self._ends:
            replace = self._patches.enter_context
            replace(replaced(clip_grad, "_get_total_norm", self._norm_for))
            replace(replaced(clip_grad, "_clip_grads_with_norm_", self._clip_for))
            replace(replaced(grad_scaler.GradScaler, "_unscale_grads_", self._unscale_for))
            replace(replaced(grad_scaler.GradScaler, "_check_inf_per_device", self._look_for))
        self.swaps.add(swap)
        self._ends[id(swap)] = end = weakref.finalize(swap, self._end, id(swap))
        end.atexit = False

    def discard(self, swap: Swap) -> None:
        """Does so no more. What a script drops together with its optimizer is discarded by itself."""
        self.swaps.discard(swap)
        if (end := self._ends.get(id(swap))) is not None:
            end()

    def _end(self, key: int) -> None:
        self._ends.pop(key, None)
        if not self._ends:
            self._patches.close()
            self._tables.clear()
            self._last = None

    def why_broken(self) -> str:
        """Why torch clips again somewhere, in words; empty where no kernel has failed."""
        return next(iter(self._tables.broken.values()), "")

    def outcome(
        self,
        grads: list[torch.Tensor],
        max_norm: float,
        *,
        epsilon: float = TORCH_EPSILON,
        grad_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """What the kernel `norm` says of gradients, divided by their scale: norm, factor that clips them,
        whether an infinity is among them. `None` where it cannot."""
        found = self._tables.look_at(grads)
        if found is None:
            return None
        return self._tables.measure(found, max_norm=max_norm, epsilon=epsilon, grad_scale=grad_scale)

    def _norm_for(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @torch.no_grad()
        def get_total_norm(
            tensors: torch.Tensor | Iterable[torch.Tensor],
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> torch.Tensor:
            grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            measured = None
            if float(norm_type) == 2.0 and foreach is not False and not error_if_nonfinite:
                measured = self._measure(grads, self._having(grads, "deferred"))
            self._last = measured
            if measured is None:
                return original(grads, norm_type, error_if_nonfinite, foreach)
            return measured.norm

        return get_total_norm

    def _clip_for(self, original: Callable[..., None]) -> Callable[..., None]:
        @torch.no_grad()
        def clip_grads_with_norm_(
            parameters: torch.Tensor | Iterable[torch.Tensor],
            max_norm: float,
            total_norm: torch.Tensor,
            foreach: bool | None = None,
        ) -> None:
            params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            grads = [grad for grad in map(_GRAD, params) if grad is not None]
            last, self._last = self._last, None
            if (
                last is None
                or last.norm is not total_norm
                or last.version != total_norm._version
                or last.grads.addresses != places(grads)
                or not self._clip(last, grads, float(max_norm))
            ):
                original(params, max_norm, total_norm, foreach)

        return clip_grads_with_norm_

    def _look_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check_inf_per_device(scaler: Any, optimizer: Any) -> Any:
            self._looking.now = True
            try:
                return original(scaler, optimizer)
            finally:
                self._looking.now = False

        return check_inf_per_device

    def _unscale_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @torch.no_grad()
        def unscale_grads_(
            scaler: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
        ) -> dict[torch.device, torch.Tensor]:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [grad for grad in map(_GRAD, params) if grad is not None]
            swap = next((each for each in self.swaps if each.optimizer is optimizer), None)
            found = None
            only_looks = self._looking.now
            if swap is not None and (only_looks or (swap.clip == "deferred" and not allow_fp16)):
                found = self._tables.look_at(grads)
                if found is not None and torch.float16 in found.kind.dtypes and not only_looks:
                    found = None  # torch refuses it, in words
            grad_scale = None if only_looks else scaler._scale
            outcome_4 = None
            if found is not None:
                outcome_4 = self._tables.measure(found, max_norm=self._max_norm, grad_scale=grad_scale)
            if swap is None or found is None or outcome_4 is None:
                result: dict[torch.device, torch.Tensor] = original(
                    scaler, optimizer, inv_scale, found_inf, allow_fp16
                )
                return result
            if grad_scale is not None:
                swap.defer(
                    grads, found.addresses, outcome_4, max_norm=self._max_norm, grad_scale=grad_scale
                )
            return {outcome_4.device: outcome_4[2]}

        return unscale_grads_

    def clip(self, grads: list[torch.Tensor], max_norm: float, *, defer: bool) -> torch.Tensor | None:
        """Clips gradients, or lets the step of a swap do it that has exactly these, if there is one.

        Returns:
            Their norm; `None` where kernels cannot, and nothing was done.
        """
        measured = self._measure(grads, self._having(grads, "exact", "deferred") if defer else None)
        clipped = measured is not None and self._clip(measured, grads, max_norm)
        return measured.norm if measured is not None and clipped else None

    def _clip(self, measured: Measured, grads: list[torch.Tensor], max_norm: float) -> bool:
        """Multiplies gradients by what clips them, or has a step do it. Returns whether it did."""
        self._max_norm = max_norm
        coef = measured.outcome_4[1]
        if max_norm != measured.max_norm:
            coef = torch.clamp(max_norm / (measured.outcome_4[0] + TORCH_EPSILON), max=1.0)
        swap = None if measured.defers is None else measured.defers()
        if swap is not None and swap in self.swaps:
            addresses, limit = measured.grads.addresses, measured.max_norm
            swap.defer(grads, addresses, measured.outcome_4, max_norm=limit, coef=coef)
            return True
        if not measured.grads.kind.are_f32 or not self._tables.scale(measured.grads, coef):
            return False
        increment_version(grads)
        return True

    def _measure(self, grads: list[torch.Tensor], deferring: Swap | None) -> Measured | None:
        """The norm of gradients by a kernel, or `None` where torch has to measure it."""
        found = self._tables.look_at(grads)
        # Torch computes the norm and the factor of 16-bit gradients in 16 bits.
        if found is None or not (deferring is not None or found.kind.are_f32):
            return None
        pending = deferring.pending if deferring is not None else None
        known = self._max_norm
        if pending is not None and pending.is_of(grads) and pending.is_untouched():
            outcome_4: torch.Tensor | None = pending.outcome_4
            known = pending.max_norm
        else:
            outcome_4 = self._tables.measure(found, max_norm=known)
        if outcome_4 is None:
            return None
        norm = outcome_4[0].to(grads[0].dtype)
        return Measured(
            norm=norm,
            version=norm._version,
            outcome_4=outcome_4,
            grads=found,
            max_norm=known,
            defers=None if deferring is None else weakref.ref(deferring),
        )

    def _having(self, grads: Sequence[torch.Tensor], *levels: str) -> Swap | None:
        """The swap on one of these levels whose optimizer has exactly these gradients."""
        for swap in self.swaps if grads else ():
            if swap.clip not in levels:
                continue
            own = swap.grads()
            if len(own) == len(grads) and (
                all(map(is_, own, grads)) or set(map(id, own)) == set(map(id, grads))
            ):
                return swap
        return None


CLIPPING = Clipping()
"""Of this process: the functions replaced are torch's, and there is one torch."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, *, defer: bool = False
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` by kernels where they can, with or without a swap.

    Args:
        parameters: Those whose gradients are clipped together.
        max_norm: To what.
        defer: Whether it may wait for the step of a swapped optimizer that has exactly these gradients,
            which then writes none of them; until then `.grad` shows what was there before.

    Returns:
        The norm of the gradients before.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [grad for grad in map(_GRAD, params) if grad is not None]
    norm = CLIPPING.clip(grads, float(max_norm), defer=defer)
    return clip_grad.clip_grad_norm_(params, max_norm) if norm is None else norm


def warn_touched(optimizer: str) -> None:
    """Says that the script did what deferring does not allow."""
    warnings.warn(
        f"kernels: a gradient of {optimizer} was changed between clipping, which was deferred, and the "
        "step; from now on clipping is not deferred.",
        RuntimeWarning,
        stacklevel=3,
    )
