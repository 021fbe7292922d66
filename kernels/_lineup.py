"""The parameters of one optimizer on one device, lined up for one launch: their rows and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from diagnose.kernels._algorithms import Algorithm
from diagnose.kernels._device import why_none
from diagnose.kernels._layout import fits
from diagnose.kernels._structs import PAIRS, Feature, Group, GroupFlag, Row
from diagnose.kernels._table import Table
from torch.autograd.graph import increment_version

_ROW_STATES = ("m", "v", "v_max")

_EMPTY_GRADIENT = 8
"""Address of a gradient without elements, which has no memory: 0 says that there is no gradient."""

_FEATURES = {GroupFlag.AMSGRAD: Feature.AMSGRAD, GroupFlag.STOCHASTIC: Feature.STOCHASTIC}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter as it was when it was lined up.

    Attributes:
        index: Its place among all parameters of the optimizer.
        group: The index of its group.
        param: The parameter.
        state: Its entry in the optimizer's state.
        moments: The tensors of the state that the kernel updates, by name.
        grad_dtype: The type that its gradients have.
        shape: Its shape, which its gradients have.
        stride: Its strides; a gradient with others may still fit.
    """

    index: int
    group: int
    param: torch.Tensor
    state: dict[str, Any]
    moments: Mapping[str, torch.Tensor]
    grad_dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def row(self) -> Row:
        """What the kernel reads of it."""
        dtype = self.param.dtype
        state_dtype = next((moment.dtype for moment in self.moments.values()), dtype)
        addresses = [moment.data_ptr() for moment in self.moments.values()]
        return Row(
            p=self.param.data_ptr(),
            count=self.param.numel(),
            group=self.group,
            pair=PAIRS[dtype, self.grad_dtype, state_dtype],
            **dict(zip(_ROW_STATES, addresses, strict=False)),
        )

    def is_as_lined_up(self) -> bool:
        """Whether the state still holds the tensors that the row points to."""
        return all(self.state.get(name) is moment for name, moment in self.moments.items())

    def takes(self, grad: torch.Tensor) -> bool:
        """Whether the row can be updated with this gradient."""
        if (
            grad.dtype is not self.grad_dtype
            or grad.layout is not torch.strided
            or grad.shape != self.shape
        ):
            return False
        return grad.stride() == self.stride or fits([self.param, grad, *self.moments.values()])


def why_misfit(param: torch.Tensor, grad: torch.Tensor, moments: Sequence[torch.Tensor]) -> str:
    """Why a parameter cannot be updated by a kernel in this step, in words; empty if it can."""
    if any(tensor.layout is not torch.strided for tensor in (param, grad)):
        return "a gradient is sparse"
    nowhere = why_none(param.device)
    if nowhere:
        return nowhere
    dtypes = {moment.dtype for moment in moments} or {param.dtype}
    if len(dtypes) != 1 or (param.dtype, grad.dtype, *dtypes) not in PAIRS:
        state = " and ".join(sorted(map(str, dtypes)))
        return f"a parameter of {param.dtype} with a gradient of {grad.dtype} and a state of {state}"
    if len({tensor.device for tensor in (param, grad, *moments)}) != 1:
        return "a parameter, its gradient and its state are on different devices"
    if not fits([param, grad, *moments]):
        return "a parameter, its gradient and its state lie in memory in different orders or with gaps"
    return ""


class Lineup:
    """Members on one device and the table that holds their rows.

    Attributes:
        members: The parameters, in the order of the rows.
        place: The device.
        table: The rows.

    Args:
        algorithm: How they are updated.
        members: The parameters.
        groups: All groups of the optimizer.
        seed: Of the random numbers by which some are rounded.
    """

    def __init__(
        self, algorithm: Algorithm, members: Sequence[Member], groups: Sequence[Group], seed: int = 0
    ) -> None:
        self.members = members
        self.place = members[0].param.device
        rows = [member.row() for member in members]
        self.table = Table(self.place, rows, groups, seed=seed)
        self._algorithm = algorithm
        flags = GroupFlag(reduce(or_, (group.flags for group in groups)))
        features = [feature for flag, feature in _FEATURES.items() if flag in flags]
        self._defines = {
            "PAIRS": reduce(or_, (1 << row.pair for row in rows)),
            "FEATURES": int(reduce(or_, features, Feature(0))),
        }
        self._flags = [group.flags for group in groups]
        self._params = [member.param for member in members]
        self._moments = [moment for member in members for moment in member.moments.values()]
        self._addresses = self._look_up()

    def is_current(self, groups: Sequence[Group]) -> bool:
        """Whether the rows still say where parameters and states are. Looked at before each step: a stale
        address is silent corruption."""
        return (
            self._look_up() == self._addresses
            and all(member.is_as_lined_up() for member in self.members)
            and [group.flags for group in groups] == self._flags
        )

    def step(
        self,
        grads: Mapping[int, torch.Tensor],
        groups: Sequence[Group],
        *,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        clip_coef: torch.Tensor | None,
        unscale_in_memory: bool,
    ) -> None:
        """Updates the members that have a gradient.

        Args:
            grads: Gradients by the parameters' places among all of the optimizer.
            groups: All groups of the optimizer.
            grad_scale: What the gradients are still multiplied by.
            found_inf: Unless it is zero, nothing is updated.
            clip_coef: What the gradients are still to be multiplied by.
            unscale_in_memory: Whether the gradients themselves are divided by `grad_scale`.
        """
        self.table.point_to([_address(grads.get(member.index)) for member in self.members])
        self.table.set_groups(groups)
        if grad_scale is not None and unscale_in_memory:
            self.table.run("scale", "scale", grad_scale=grad_scale)
            grad_scale = None
        for entry in self._algorithm.entries:
            self.table.run(
                self._algorithm.stem,
                entry,
                self._defines,
                grad_scale=grad_scale,
                found_inf=found_inf,
                clip_coef=clip_coef,
            )
        increment_version([member.param for member in self.members if member.index in grads])

    def adopt(self, counts: Sequence[torch.Tensor | float]) -> None:
        """Takes over how many steps each member has taken, without waiting for the device where it is known
        only there."""
        steps_N = self.table.steps_N
        known = [isinstance(count, float) or count.device.type == "cpu" for count in counts]
        on_host = [float(count) if here else 0.0 for count, here in zip(counts, known, strict=True)]
        steps_N.copy_(torch.tensor(on_host))
        for row, (count, here) in enumerate(zip(counts, known, strict=True)):
            if not here:
                steps_N[row].copy_(count)

    def _look_up(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._params)) + list(
            map(torch.Tensor.data_ptr, self._moments)
        )


def _address(grad: torch.Tensor | None) -> int:
    return 0 if grad is None else grad.data_ptr() or _EMPTY_GRADIENT


def by_device(members: Iterable[Member]) -> dict[torch.device, list[Member]]:
    """Members on the same device together, in their order."""
    found: dict[torch.device, list[Member]] = {}
    for member in members:
        found.setdefault(member.param.device, []).append(member)
    return found
