"""The parameters of one optimizer on one device, lined up for one launch: their rows and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import compress, repeat
from operator import is_, or_
from typing import Any

import torch
from diagnose.kernels._algorithms import Algorithm
from diagnose.kernels._device import why_none
from diagnose.kernels._layout import fits
from diagnose.kernels._likeness import Likeness
from diagnose.kernels._masters import COPY_FLAGS, take_over
from diagnose.kernels._shards import is_sharded, own_part
from diagnose.kernels._structs import PAIRS, Feature, Group, GroupFlag, Row
from diagnose.kernels._table import Table
from torch.autograd.graph import increment_version

_ROW_STATES = ("m", "v", "v_max", "v_scales")

_EMPTY_GRADIENT = 8
"""Address of a gradient without elements, which has no memory: 0 says that there is no gradient."""

_FEATURES = {GroupFlag.AMSGRAD: Feature.AMSGRAD, GroupFlag.STOCHASTIC: Feature.STOCHASTIC}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter as it was when it was lined up.

    Attributes:
        index: Its place among all parameters of the optimizer.
        dice: Its number for rounding by chance.
        group: The index of its group.
        settings: The group itself, which may have another index later.
        whole: The parameter.
        param: What of it is on this rank: all, unless it is sharded. Likewise of states and gradients.
        state: Its entry in the optimizer's state.
        moments: The tensors of the state that the kernel updates, by name.
        alike: Those of them that hold an element for each of the parameter's.
        master: That of them which is stepped in place of the parameter, the last one; `None` if none is.
        grad_dtype: The type that its gradients have.
        pair: The number of the kernel's body for these types.
        shape: Its shape, which its gradients have.
        stride: Its strides; a gradient with others may still fit.
    """

    index: int
    dice: int
    group: int
    settings: Mapping[str, Any]
    whole: torch.Tensor
    param: torch.Tensor
    state: dict[str, Any]
    moments: Mapping[str, torch.Tensor]
    alike: Sequence[torch.Tensor]
    master: torch.Tensor | None
    grad_dtype: torch.dtype
    pair: int
    shape: torch.Size
    stride: tuple[int, ...]

    def row(self) -> Row:
        """What the kernel reads of it."""
        stepped = self.param if self.master is None else self.master
        moments = [moment for moment in self.moments.values() if moment is not self.master]
        row = Row(
            p=stepped.data_ptr(),
            count=self.param.numel(),
            group=self.group,
            dice=self.dice,
            pair=self.pair,
            **dict(zip(_ROW_STATES, map(torch.Tensor.data_ptr, moments), strict=False)),
        )
        if self.master is not None:
            row.copy, row.flags = self.param.data_ptr(), COPY_FLAGS[self.param.dtype]
        return row

    def takes(self, grad: torch.Tensor) -> bool:
        """Whether the row can be updated with this gradient."""
        if (
            grad.dtype is not self.grad_dtype
            or grad.layout is not torch.strided
            or grad.is_neg()
            or grad.shape != self.shape
            or (grad.numel() and not grad.data_ptr())
        ):
            return False
        return grad.stride() == self.stride or fits([self.param, grad, *self.alike])


def why_misfit(
    algorithm: Algorithm, param: torch.Tensor, grad: torch.Tensor, moments: Sequence[torch.Tensor]
) -> str:
    """Why a parameter cannot be updated by a kernel in this step, in words; empty if it can."""
    if any(tensor.layout is not torch.strided for tensor in (param, grad)):
        return "a gradient is sparse"
    nowhere = why_none(param.device)
    if nowhere:
        return nowhere
    stepped, state = algorithm.dtypes(param, moments)
    if len({moment.dtype for moment in moments}) > 1 or (stepped, grad.dtype, state) not in PAIRS:
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
        counts: What stands in each member's state for its count of steps; empty where states count none.
        is_halfway: Whether a step has changed states and, having failed, not the parameters.

    Args:
        algorithm: How they are updated.
        members: The parameters.
        groups: All groups of the optimizer.
    """

    def __init__(self, algorithm: Algorithm, members: Sequence[Member], groups: Sequence[Group]) -> None:
        self.members = members
        self.place = members[0].param.device
        rows = [member.row() for member in members]
        self.table = Table(self.place, rows, groups)
        self.counts: Sequence[torch.Tensor] = ()
        self.is_halfway = False
        self._algorithm = algorithm
        flags = GroupFlag(reduce(or_, (group.flags for group in groups)))
        features = [feature for flag, feature in _FEATURES.items() if flag in flags]
        self._masters = [member for member in members if member.master is not None]
        self._versions = [-1] * len(self._masters)
        features += [Feature.COPY] if self._masters else []
        self._defines = {
            "PAIRS": reduce(or_, (1 << row.pair for row in rows)),
            "FEATURES": int(reduce(or_, features, Feature(0))),
        }
        self._unscaling = {**self._defines, "FEATURES": self._defines["FEATURES"] | int(Feature.UNSCALE)}
        self._flags = [group.flags for group in groups]
        self._params = [member.whole for member in members]
        self._are_sharded = any(map(is_sharded, self._params))
        self._indices = [member.index for member in members]
        self._all = frozenset(self._indices)
        self._fitted: Likeness | None = None
        self._states = [member.state for member in members]
        held = [(member.state, *pair) for member in members for pair in member.moments.items()]
        self._holders = [state for state, _, _ in held]
        self._names = [name for _, name, _ in held]
        self._addresses = self._look_up()
        self._grads: list[int] = []
        self._updated: list[torch.Tensor] = []

    def is_current(self, groups: Sequence[Group]) -> bool:
        """Whether the rows still say where parameters and states are, and states count in the table. Looked
        at before each step: a stale address is silent corruption."""
        try:
            found = self._look_up()
        except (TypeError, RuntimeError):  # a state is gone, or is no tensor with memory any more
            return False
        return (
            found == self._addresses
            and [group.flags for group in groups] == self._flags
            and all(map(is_, map(dict.get, self._states, repeat("step")), self.counts))
        )

    def take(self, grads: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Looks at the gradients of this step and remembers those that the rows can be updated with.

        Args:
            grads: Of all parameters of the optimizer.

        Returns:
            The places, among all parameters, of those that will be updated.
        """
        own = grads if len(self._all) == len(grads) else [grads[index] for index in self._indices]
        if self._fitted is not None and self._fitted.of(own):
            alike: Any = own
            addresses = list(map(torch.Tensor.data_ptr, alike))
            if 0 not in addresses:
                self._grads, self._updated = addresses, self._params
                return self._all
        fitting = [
            grad is not None and member.takes(grad) for member, grad in zip(self.members, own, strict=True)
        ]
        self._grads = [
            grad.data_ptr() or _EMPTY_GRADIENT if fit and grad is not None else 0
            for grad, fit in zip(own, fitting, strict=True)
        ]
        if all(fitting):
            self._fitted = Likeness([grad for grad in own if grad is not None])
        self._updated = list(compress(self._params, fitting))
        return frozenset(compress(self._indices, fitting))

    def prepare(self, *, unscales: bool) -> None:
        """Has compiled what a step will launch; see `Table.prepare`.

        Args:
            unscales: Whether it divides gradients in memory.
        """
        for entry in self._algorithm.entries:
            self.table.prepare(self._algorithm.stem, entry, self._unscaling if unscales else self._defines)

    def step(
        self,
        groups: Sequence[Group],
        *,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        clip_coef: torch.Tensor | None,
        unscales: bool,
    ) -> None:
        """Updates the members whose gradients were taken.

        Args:
            groups: All groups of the optimizer.
            grad_scale: What the gradients are still multiplied by.
            found_inf: Unless it is zero, nothing is updated.
            clip_coef: What the gradients are still to be multiplied by.
            unscales: Whether gradients are divided by `grad_scale` in memory too, if the step takes place.
        """
        self.is_halfway = False
        if not self._updated:
            return
        if self._masters:
            self._follow_parameters()
        self.table.point_to(self._grads)
        for group in groups if unscales else ():
            group.flags |= GroupFlag.UNSCALE
        self.table.set_groups(groups)
        for entry in self._algorithm.entries:
            self.table.run(
                self._algorithm.stem,
                entry,
                self._unscaling if unscales else self._defines,
                grad_scale=grad_scale,
                found_inf=found_inf,
                clip_coef=clip_coef,
            )
            self.is_halfway = entry != self._algorithm.entries[-1]
        increment_version(self._updated)
        if self._are_sharded:
            increment_version(list(map(own_part, self._updated)))
        self._versions = [member.param._version for member in self._masters]

    def _follow_parameters(self) -> None:
        """Lets masters follow parameters that someone else has written since the last step."""
        for member, version in zip(self._masters, self._versions, strict=True):
            if member.master is not None and member.param._version != version:
                take_over(member.master, member.param)

    def adopt(self, counts: Sequence[torch.Tensor | float]) -> None:
        """Takes over how many steps each member has taken, without waiting for the device where it is known
        only there."""
        steps_N = self.table.steps_N
        known = [isinstance(count, float) or count.device.type == "cpu" for count in counts]
        on_host = [float(count) if here else 0.0 for count, here in zip(counts, known, strict=True)]
        steps_N.copy_(torch.tensor(on_host, device="cpu"))
        for row, (count, here) in enumerate(zip(counts, known, strict=True)):
            if isinstance(count, torch.Tensor) and not here:
                steps_N[row].copy_(count.reshape(()))  # FSDP has saved them with a dimension

    def _look_up(self) -> list[int]:
        held: Any = map(dict.get, self._holders, self._names)
        params: Iterable[torch.Tensor] = self._params
        if self._are_sharded:  # a DTensor's own address is 0
            params, held = map(own_part, params), map(own_part, held)
        return [*map(torch.Tensor.data_ptr, params), *map(torch.Tensor.data_ptr, held)]


def by_device(members: Iterable[Member]) -> dict[torch.device, list[Member]]:
    """Members on the same device together, in their order."""
    found: dict[torch.device, list[Member]] = {}
    for member in members:
        found.setdefault(member.param.device, []).append(member)
    return found
