"""PowerSGD: the average of matrices over ranks, approximated by a product of two thin ones.

Axes: S matrices of one shape, N rows, M columns, K columns of the thin ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import distributed

from diagnose.actions._ddp_unsent import Unsent

RANK = 4
"""Columns of the thin matrices. As published; 2 was enough for images, and 4 for text."""

MIN_SAVED = 2
"""So many times less must be sent of a matrix, to be worth the products. Torch's default."""

DEPENDENT = 1e-4
"""A column of which less than this part is left when the ones before have been taken out depends on them:
what is left is rounding."""


class LowRank:
    """The exchange of one model's gradients, and what it knows from earlier steps."""

    def __init__(self) -> None:
        self._unsent = Unsent()
        self._columns: dict[int, torch.Tensor] = {}  # by parameter: those that matrices are multiplied with
        self._random: dict[int, torch.Tensor] = {}  # by their length: what they begin with

    def averaged(self, group: Any, bucket: Any) -> Generator[list[Any], None, None]:
        whole_N, num_ranks = bucket.buffer().div_(group.size()), group.size()
        self._unsent.add_to(bucket)
        before_N = whole_N.clone()
        small, matrices = [], defaultdict(list)
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            if is_worth_it(parameter):
                matrices[_shape(parameter)].append((gradient, id(parameter)))
            else:
                small.append(gradient)
        groups = list(matrices.values())
        wholes = [torch.stack([g.reshape(g.shape[0], -1) for g, _ in each]) for each in groups]
        starts = [self._starts(whole, each) for whole, each in zip(wholes, groups, strict=True)]
        lefts = [torch.bmm(whole, start) for whole, start in zip(wholes, starts, strict=True)]
        yield from _summed([*small, *lefts], group)
        rights = []
        for whole, left in zip(wholes, lefts, strict=True):
            make_orthonormal(left)
            rights.append(torch.bmm(whole.transpose(1, 2), left))
        yield from _summed(rights, group)
        for each, left, right in zip(groups, lefts, rights, strict=True):
            for (gradient, key), whole, columns in zip(
                each, torch.bmm(left, right.transpose(1, 2)), right, strict=True
            ):
                gradient.copy_(whole.view(gradient.shape))
                self._columns[key] = columns
        left_N = before_N.sub_(whole_N, alpha=1 / num_ranks)
        offset = 0
        for parameter in bucket.parameters():
            if not is_worth_it(parameter):  # it has been sent as it is
                left_N[offset : offset + parameter.numel()] = 0.0
            offset += parameter.numel()
        self._unsent.keep(bucket, left_N)

    def _starts(self, whole_SNM: torch.Tensor, each: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """What to multiply matrices with: the columns of the step before, which the directions change
        little from. A column that was nothing, or no number, begins again."""
        length = whole_SNM.shape[2]
        if length not in self._random:
            generator = torch.Generator().manual_seed(length)  # the same on every rank; not the script's
            self._random[length] = torch.randn(length, RANK, generator=generator, device="cpu").to(
                whole_SNM.device
            )
        random = self._random[length]
        start_SMK = torch.stack([self._columns.get(key, random) for _, key in each])
        norm = start_SMK.norm(dim=1, keepdim=True)
        return torch.where((norm > 0) & torch.isfinite(norm), start_SMK / norm, random)


def is_worth_it(parameter: torch.Tensor) -> bool:
    """Whether the gradient of a parameter takes much less when it is sent as two thin matrices."""
    if parameter.dim() < 2:
        return False
    rows, columns = _shape(parameter)
    return (rows + columns) * RANK * MIN_SAVED < rows * columns


def make_orthonormal(columns_SNK: torch.Tensor) -> None:
    """Makes the columns of each matrix orthogonal, of length 1; one that depends on others becomes 0.

    By Gram-Schmidt, twice for each column, as once leaves rounding. Unlike a library's QR it never makes
    the host wait.
    """
    for k in range(columns_SNK.shape[2]):
        column, others = columns_SNK[:, :, k : k + 1], columns_SNK[:, :, :k]
        whole = column.norm(dim=1, keepdim=True)
        column /= torch.where(whole > 0, whole, 1.0)
        for _ in range(2):
            column -= torch.bmm(others, torch.bmm(others.transpose(1, 2), column))
        left = column.norm(dim=1, keepdim=True)
        column.copy_(torch.where(left > DEPENDENT, column / left, torch.where(left.isnan(), left, 0.0)))


def _shape(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.shape[0], parameter[0].numel()


def _summed(tensors: Sequence[torch.Tensor], group: Any) -> Generator[list[Any], None, None]:
    """Sums tensors over the ranks, in one message."""
    if not tensors:
        return
    flat_N = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield [distributed.all_reduce(flat_N, group=group, async_op=True)]
    for tensor, part in zip(tensors, flat_N.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
