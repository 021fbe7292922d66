"""Tells whether what a model computes with an action is what the action's class promises.

How much may differ is measured on the script itself: a fixed tolerance is too wide for one model and too
narrow for another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from diagnose.actions._distance import Tensors, cosine, distance, equal, finite, overall_distance
from diagnose.actions._shadow_step import TF32, Result, Shadow, batch_size, in_order
from diagnose.actions._untouched import CannotCheck, RandomState
from diagnose.core.trial import Safety

ROUNDING_FACTOR = 20.0
"""Another order of arithmetic may differ by so many times what another order of the samples does."""

ROUNDING_CEILING = 1e-3
ROUNDING_FACTOR_ABOVE = 3.0
"""Where that is more than this, in models of few bits, only by so many times: both round as coarsely."""

ROUNDING_FLOOR = 0.25
"""In any case a quarter of a unit in the last place of the coarsest type: one result in sixteen is rounded
to its neighbour. Samples in another order keep theirs in bfloat16, and move the sums hardly at all."""

ROUNDING_FIXED = 1e-5
"""Allowed instead where the samples cannot be put in another order. Permuted samples, micro-batches and
channels_last differed by 2e-7 to 6e-7 in float32."""

TF32_FACTOR = 3.0
TF32_FLOOR = 2.0
TF32_CEILING = 0.5
"""Where products are TF32's, another engine of cuDNN's may round their inputs, cut them off or leave them
whole. Outputs, gradients and buffers may each differ by so many times what they do without TF32; by so many
of its units in any case, and else never by more than that part of the whole. With convolutions' inputs
rounded on a CPU, gradients of three convolutions moved by 1 to 2 %, of a ResNet-8 by 5 %, of a ResNet-20 by
18 % (some units of a ReLU are on, or off); cut off and not rounded, they lay 1.2 to 2 times as far apart.
Outputs moved by less than 1e-3."""

NOT_ROUNDING = 1000.0
NOT_ROUNDING_AT_ALL = 0.05
"""If another order of the samples changes more than so many units in the last place, or this part of the
whole, then the order means something to the model."""

PRECISION_SHARE = 0.10
PRECISION_COSINE = 0.99
"""Fewer bits may move a gradient by this part of what another mini-batch would move it by, and turn it so
little. bfloat16 moved it by 1.4 to 3.2 %."""

PRECISION_FIXED = 0.05
"""Allowed where that is not known: a tenth of the smallest difference between mini-batches seen (0.5)."""

UPDATE_FACTOR = 2.0
"""An optimizer's step may be so many times as far from the exact one as the script's own step is, or half a
unit in the last place if that is more: both round to the same grid, a few times on the way."""

PRECISION_UPDATE_FACTOR = 1000.0
"""Likewise where fewer bits are allowed: about what bfloat16 lacks against float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a numerics check.

    Attributes:
        ok: Whether the action computes what its class promises. False also where nothing could be checked.
        checked: Whether it could be checked.
        error: How far the action's results were from the script's own, relative to these.
        allowed: How far they may be.
        reason: The outcome in words.
    """

    ok: bool
    checked: bool = True
    error: float = 0.0
    allowed: float = 0.0
    reason: str = ""


def cannot_check(reason: object) -> Verdict:
    """The outcome where the check could not be made."""
    return Verdict(ok=False, checked=False, reason=f"numerics cannot be checked: {reason}")


def judge(
    shadow: Shadow, own: Result, changed: Result, safety: Safety, in_full: Result | None = None
) -> Verdict:
    """Compares what the script computes itself with what it computes with an action.

    Args:
        in_full: What it computes with the action and without TF32 in convolutions, where `shadow.tf32`.
    """
    if not finite(own.outputs) or not finite(own.gradients):
        raise CannotCheck("the script's own outputs or gradients are not finite at this step")
    same_random = own.random == changed.random
    if _all_equal(own, changed) and same_random:
        return Verdict(ok=True, reason="equal bit for bit")
    if not finite(changed.outputs) or not finite(changed.gradients):
        return Verdict(
            ok=False, error=math.inf, reason="outputs or gradients are not finite with the action"
        )
    if safety is Safety.PRECISION:
        return _judge_precision(shadow, own, changed)
    if not same_random:
        reason = "the action draws other random numbers, which every later step would see"
        return Verdict(ok=False, error=_error(own, changed), reason=reason)
    if safety is Safety.EXACT:
        noise, error = _error(own, shadow.compute(gradients=own.sent)), _error(own, changed)
        if noise == 0:
            return _unequal(error)
        return _verdict(error, ROUNDING_FACTOR * noise, "the same step computed twice")
    if safety is Safety.ROUNDING:
        verdict = _verdict(_error(own, changed), *_rounding_allowed(shadow, own))
        if verdict.ok or not shadow.tf32:
            return verdict
        return _judge_tf32(shadow, own, changed, in_full, verdict.allowed)
    raise CannotCheck("it is meant to change the training")


def _judge_tf32(
    shadow: Shadow, own: Result, changed: Result, in_full: Result | None, least: float
) -> Verdict:
    """Likewise where engines may round the inputs of products in other ways. What is the same without TF32
    has only had another engine chosen, as the script allows. Else, how far a model carries such rounding,
    it shows itself: samples in another order are rounded alike."""
    with convolutions_in_full():
        full = shadow.compute(gradients=own.sent)
    if in_full is not None:
        verdict = _verdict(_error(full, in_full), least, "another order of the samples, without TF32")
        if verdict.ok:
            return verdict
    verdicts = []
    for error, noise in zip(_errors(own, changed), _errors(own, full), strict=True):
        allowed = max(least, TF32_FLOOR * TF32, min(TF32_FACTOR * noise, TF32_CEILING))
        verdicts.append(_verdict(error, allowed, "what the script's own TF32 changes"))
    return max(verdicts, key=lambda verdict: verdict.error / verdict.allowed)


@contextmanager
def convolutions_in_full() -> Iterator[None]:
    """Inside, convolutions of float32 are not TF32's. Other products stay: code would be compiled anew."""
    try:
        before = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the script uses the settings that have replaced this one
        yield
        return
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _judge_precision(shadow: Shadow, own: Result, changed: Result) -> Verdict:
    error = max(
        overall_distance(own.gradients, changed.gradients),
        overall_distance(_inexact(own.outputs), _inexact(changed.outputs)),
    )
    allowed, yardstick = PRECISION_FIXED, "a fixed bound: the output has no rows to tell mini-batches by"
    if all(sent.dim() and sent.shape[0] > 1 for sent in own.sent):
        half = shadow.compute(gradients=[_first_half(sent) for sent in own.sent])
        allowed = PRECISION_SHARE * _minibatch_noise(own.gradients, half.gradients)
        yardstick = "a tenth of what another mini-batch changes"
    verdict = _verdict(error, allowed, yardstick)
    angle = cosine(own.gradients, changed.gradients)
    if verdict.ok and angle < PRECISION_COSINE:
        reason = f"gradients point elsewhere: the cosine is {angle:.4f}, below {PRECISION_COSINE}"
        return Verdict(ok=False, error=error, allowed=allowed, reason=reason)
    return verdict


def _first_half(gradient: torch.Tensor) -> torch.Tensor:
    half = gradient.clone()
    half[half.shape[0] // 2 :] = 0
    return half


def _minibatch_noise(whole: Tensors, half: Tensors) -> float:
    """Returns how far the gradients of two mini-batches of this size are apart, relative to one of them.

    The difference of the two halves' gradients varies as much as their sum does, and that of two whole
    batches by the square root of two more.
    """
    return math.sqrt(2) * overall_distance(whole, [part if part is None else 2 * part for part in half])


def _rounding_allowed(shadow: Shadow, own: Result) -> tuple[float, str]:
    """Measures what another order of the samples changes; returns what may differ, and why."""
    floor = ROUNDING_FLOOR * shadow.unit
    fixed = max(ROUNDING_FIXED, floor), "a fixed bound: the samples cannot be put in another order"
    size = batch_size(shadow.inputs)
    shapes = {sent.shape[0] for sent in own.sent if sent.shape}
    if size < 2 or shapes - {size} or own.random != RandomState(shadow.devices):
        return fixed
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1), device="cpu")
    back = torch.argsort(order)
    try:
        permuted = shadow.compute(gradients=[in_order(g, order, size) for g in own.sent], order=order)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 (packed sequences, say, are sorted by their lengths)
        return fixed
    num_parameters = sum(p.requires_grad for p in shadow.inner.parameters())
    noise = max(
        distance(own.gradients[:num_parameters], permuted.gradients[:num_parameters]),
        distance(_inexact(own.outputs), [in_order(o, back, size) for o in _inexact(permuted.outputs)]),
        distance(own.buffers, permuted.buffers),
    )
    if noise > min(NOT_ROUNDING * shadow.unit, NOT_ROUNDING_AT_ALL):
        return fixed
    allowed = min(ROUNDING_FACTOR * noise, max(ROUNDING_FACTOR_ABOVE * noise, ROUNDING_CEILING))
    return max(allowed, floor), "another order of the samples"


def _verdict(error: float, allowed: float, yardstick: str) -> Verdict:
    ok = error <= allowed
    sign = "within" if ok else "beyond"
    reason = f"differs by {error:.1e}, {sign} the {allowed:.1e} allowed by {yardstick}"
    return Verdict(ok=ok, error=error, allowed=allowed, reason=reason)


def _unequal(error: float) -> Verdict:
    return Verdict(ok=False, error=error, reason=f"differs by {error:.1e}, and has to be equal bit for bit")


def _error(own: Result, other: Result) -> float:
    return max(_errors(own, other))


def _errors(own: Result, other: Result) -> tuple[float, float, float]:
    """How far outputs, gradients and buffers are apart."""
    return (
        distance(_inexact(own.outputs), _inexact(other.outputs)),
        distance(own.gradients, other.gradients),
        distance(own.buffers, other.buffers),
    )


def _all_equal(own: Result, other: Result) -> bool:
    return (
        equal(own.outputs, other.outputs)
        and equal(own.gradients, other.gradients)
        and equal(own.buffers, other.buffers)
    )


def _inexact(tensors: Tensors) -> list[torch.Tensor]:
    """Those that rounding can touch: an index of the largest may jump."""
    return [t for t in tensors if t is not None and (t.is_floating_point() or t.is_complex())]


def judge_update(
    own: Mapping[str, Tensors],
    precise: Mapping[str, Tensors],
    changed: Mapping[str, Tensors],
    safety: Safety,
) -> Verdict:
    """Compares a step of the optimizer as the script set it with one as an action sets it.

    Args:
        own: Parameters and state after the script's own step.
        precise: Likewise, computed in double precision.
        changed: Likewise with the action.
        safety: What the action promises.
    """
    if own.keys() != changed.keys():
        return Verdict(ok=False, reason=f"state is {sorted(changed)} instead of {sorted(own)}")
    if not all(map(finite, own.values())):
        raise CannotCheck("the script's own step gives values that are not finite")
    if not all(map(finite, changed.values())):
        return Verdict(ok=False, error=math.inf, reason="the step with the action gives values not finite")
    if all(equal(own[kind], changed[kind]) for kind in own):
        return Verdict(ok=True, reason="equal bit for bit")
    if safety is Safety.EXACT:
        return _unequal(max(distance(own[kind], changed[kind]) for kind in own))
    factor = UPDATE_FACTOR if safety is Safety.ROUNDING else PRECISION_UPDATE_FACTOR
    if safety is Safety.TRAINING:
        raise CannotCheck("it is meant to change the training")
    verdicts = []
    for kind in own:
        allowed = factor * max(distance(precise[kind], own[kind]), _unit(own[kind]))
        verdicts.append(
            _verdict(
                distance(precise[kind], changed[kind]), allowed, f"the script's own rounding of {kind}"
            )
        )
    return min(verdicts, key=lambda verdict: (verdict.ok, verdict.allowed - verdict.error))


def _unit(tensors: Tensors) -> float:
    """Returns half a unit in the last place: what writing a number down rounds it by."""
    kinds = {tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    return max((torch.finfo(kind).eps / 2 for kind in kinds), default=0.0)
