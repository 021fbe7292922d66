"""How far two lists of tensors are apart, in one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import starmap

import torch

Tensors = Sequence["torch.Tensor | None"]

SMALL_TENSOR = 0.1
"""A tensor counts by itself with its distance relative to its own norm, but at least to this part of an
average tensor's: the gradient of a bias in front of a batch norm is nothing but rounding."""


def equal(left: Tensors, right: Tensors) -> bool:
    """Whether both hold the same tensors, bit for bit; none is as good as zeros."""
    return len(left) == len(right) and all(starmap(_equal, zip(left, right, strict=True)))


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        present = left if right is None else right
        return present is None or not bool(_dense(present).any())
    return left.dtype == right.dtype and torch.equal(_dense(left), _dense(right))


def finite(tensors: Tensors) -> bool:
    """Whether there is no infinity and no NaN."""
    return all(bool(torch.isfinite(_dense(tensor)).all()) for tensor in tensors if tensor is not None)


def distance(left: Tensors, right: Tensors) -> float:
    """Returns the norm of the difference relative to the norm of `left`: of all tensors as one vector, or
    of the one that differs most, whichever is larger. Infinite where shapes or integers differ."""
    overall, norms, differences = _norms(left, right)
    if math.isinf(overall) or not norms:
        return overall
    least = SMALL_TENSOR * math.sqrt(sum(norm**2 for norm in norms) / len(norms))
    single = (_ratio(d, max(norm, least)) for d, norm in zip(differences, norms, strict=True))
    return max(overall, *single)


def overall_distance(left: Tensors, right: Tensors) -> float:
    """Returns the norm of the difference relative to the norm of `left`, of all tensors as one vector."""
    return _norms(left, right)[0]


def cosine(left: Tensors, right: Tensors) -> float:
    """Returns the cosine of the angle between two lists, each taken as one vector."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    products = [float((_wide(a) * _wide(b).conj()).real.sum()) for a, b in pairs]
    sizes = math.hypot(*(norm(a) for a, _ in pairs)) * math.hypot(*(norm(b) for _, b in pairs))
    return sum(products) / sizes if sizes else 1.0


def norm(tensor: torch.Tensor) -> float:
    """Returns the Euclidean norm, computed in double precision."""
    return float(torch.linalg.vector_norm(_wide(tensor)))


def _norms(left: Tensors, right: Tensors) -> tuple[float, list[float], list[float]]:
    if len(left) != len(right):
        return math.inf, [], []
    norms, differences = [], []
    for a, b in zip(left, right, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]  # not both are None
        b = torch.zeros_like(a) if b is None else b
        if a.shape != b.shape or a.device != b.device:
            return math.inf, [], []
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return math.inf, [], []
            continue
        wide, other = _wide(a), _wide(b)
        same = wide == other  # also where both are infinite, as in a mask
        norms.append(float(torch.linalg.vector_norm(torch.where(torch.isfinite(wide), wide, 0))))
        differences.append(float(torch.linalg.vector_norm(torch.where(same, 0, wide - other))))
    overall = _ratio(math.hypot(*differences), math.hypot(*norms))
    return (math.inf if math.isnan(overall) else overall), norms, differences


def _ratio(difference: float, size: float) -> float:
    return difference / size if size else (math.inf if difference else 0.0)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    dense = _dense(tensor)
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor
