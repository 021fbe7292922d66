"""Steps one optimizer by kernels, in its own state, and leaves to torch what does not fit them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from diagnose.kernels._algorithms import Algorithm, group_refusals, group_struct
from diagnose.kernels._device import FAILURES
from diagnose.kernels._dice import dice_of, steps_taken
from diagnose.kernels._entries import Entries
from diagnose.kernels._factors import Factors, at
from diagnose.kernels._foreign import foreign_refusals
from diagnose.kernels._layout import disjoint
from diagnose.kernels._lineup import Lineup, Member, by_device, why_misfit
from diagnose.kernels._masters import made_from
from diagnose.kernels._shards import PLAIN, is_sharded, own_part, own_part_alike
from diagnose.kernels._structs import PAIRS, Group, GroupFlag
from diagnose.kernels._table import keep_for_graphs
from torch.optim import Optimizer

from diagnose.hooks._signals import from_signal_handler

if TYPE_CHECKING:
    from diagnose.kernels._clip import Pending

_GRAD = attrgetter("grad")

Grads = Sequence[torch.Tensor | None]
"""The gradients of all parameters of an optimizer."""

Due = Callable[[Grads], "Pending | None"]
"""From gradients to what a step has still to do to them."""


def nothing_due(grads: Grads) -> Pending | None:
    """Of a step that only steps."""
    return None


class Stepper:
    """What an optimizer does at a step while kernels do it.

    Moments stay in the optimizer's own tensors. A parameter's count of steps becomes a view of the table's,
    so that whoever reads `state["step"]` sees it grow; `release` gives each its own again.

    Attributes:
        unscales_in_memory: Whether gradients that a `GradScaler` has scaled are divided in memory, as by
            torch's fused step, or only where they are used.
        stochastic: Whether bf16 parameters are rounded at random.
        scaling_is_ours: Whether the optimizer takes scaled gradients because of us: torch's own step for it
            does not.
        broken: Why the optimizer is torch's for good, in words; empty while it is not.
        left: Why the last step, or a part of it, was left to torch, in words; empty if nothing was.
    """

    def __init__(self, optimizer: Optimizer, algorithm: Algorithm):
        self._alive = weakref.ref(optimizer)  # which may hold this
        self._algorithm = algorithm
        self._lineups: list[Lineup] = []
        self._entries: Entries | None = None
        self._params: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._moments: list[tuple[str, ...]] = []
        self._outside: list[tuple[int, Mapping[str, Any]]] = []
        self._unbegun: dict[int, tuple[dict[str, Any], tuple[str, ...]]] = {}
        self._taken = steps_taken(optimizer)
        self._prepared: set[bool] = set()
        self.unscales_in_memory = True
        self.stochastic = False
        self.scaling_is_ours = False
        self.broken: list[str] = []
        self.left: list[str] = []

    @property
    def _optimizer(self) -> Any:
        return self._alive()

    def step(self, due: Due = nothing_due) -> list[dict[str, Any]]:
        """Updates the parameters.

        Args:
            due: Asked what is still to be done to the gradients. If it is to divide them, the optimizer may
                hold another number for that, which comes first.

        Returns:
            What is left for torch's own step, which its caller now has to do: groups with these parameters.
        """
        groups = self._optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        grads = given = list(map(_GRAD, params))
        pending = due(given)
        scale = getattr(self._optimizer, "grad_scale", None)
        factors = Factors(
            grad_scale=pending and pending.grad_scale if scale is None else scale,
            clip_coef=pending and pending.coef,
            torch_unscales=scale is not None and not self.scaling_is_ours,
        )
        if not set(map(type, params)) <= PLAIN:
            grads = list(map(own_part_alike, given, params))
        taken: frozenset[int] = frozenset()
        self.left = [*self.broken, *(reason for group in groups for reason in group_refusals(group))]
        self.left += foreign_refusals(self._optimizer)
        try:
            if self.left:
                self.release()
            elif self._line_up(params, grads) and self._prepare(factors):
                for lineup in self._lineups:
                    found = lineup.take(grads)
                    self._launch(lineup, factors)
                    taken = taken | found if taken else found
        except FAILURES as error:
            if from_signal_handler(error.__traceback__) or any(each.is_halfway for each in self._lineups):
                raise
            self._give_up(error)
        rest = {}
        if len(taken) < len(given):
            rest = {
                index: grad for index, grad in enumerate(given) if grad is not None and index not in taken
            }
        if rest and not self._prepare_for_torch(list(rest.values()), factors):
            return []
        return self._groups_of(rest) if rest else []

    def release(self) -> None:
        """Gives each parameter a count of steps as torch keeps it. The next step lines up anew."""
        for member, count in self._counts():
            if self._algorithm.counts_steps:
                member.state["step"] = count
                continue
            self._taken[member.index] = count.item()
            if not count.item():  # every step so far was skipped: the buffer holds nothing
                for name in member.moments:
                    member.state.pop(name, None)
        self._lineups, self._entries = [], None
        self._prepared.clear()

    def saved(self, state: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """The state as torch would save it at this moment, each count of steps in a tensor of its own."""
        plain: dict[int, dict[str, Any]] = {}
        for member, count in self._counts():
            if self._algorithm.counts_steps:
                plain[id(member.state)] = {**member.state, "step": count}
            elif not count.item():
                plain[id(member.state)] = {}
        return {key: plain.get(id(each), each) for key, each in state.items()}

    def _counts(self) -> Iterator[tuple[Member, torch.Tensor]]:
        """Each member with its count of steps as torch would keep it, unless the script has put another in
        its place. Waits for the device."""
        for lineup in self._lineups:
            counts = lineup.table.steps_N.cpu().unbind()
            views = lineup.counts or repeat(None)
            for member, count, view in zip(lineup.members, counts, views, strict=False):
                if view is None or member.state.get("step") is view:
                    yield member, own_count(count, member.settings, member.param)

    def _line_up(self, params: list[torch.Tensor], grads: Grads) -> bool:
        """Builds the tables unless they are current, and the states that torch would create now.

        Returns:
            Whether they are current.
        """
        if self._is_current(params, grads):
            return True
        if (
            any(grad is not None and grad.is_cuda for grad in grads)
            and torch.cuda.is_current_stream_capturing()
        ):
            self._leave_to_the_graph("no step was made before with these tensors")
            return False
        self.release()
        groups, state = self._optimizer.param_groups, self._optimizer.state
        members = []
        numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        for index, (number, param, grad) in enumerate(zip(numbers, params, grads, strict=True)):
            part = own_part(param)
            like = part if grad is None else grad
            if grad is None and param not in state:
                continue
            reason = self._why_misfit(param, like, groups[number])
            if not reason and grad is not None:
                self._create(groups[number], param)
            names = self._algorithm.held(groups[number], param)
            found = {name: state[param].get(name) for name in names}
            counts = [state[param].get("step")] if self._algorithm.counts_steps else []
            if reason or not all(isinstance(each, torch.Tensor) for each in (*found.values(), *counts)):
                self.left.append(reason or "a parameter's state lacks what its group asks for")
                continue
            moments = {name: own_part(moment) for name, moment in found.items()}
            alike = self._algorithm.alike(list(moments.values()))
            stepped, state_dtype = self._algorithm.dtypes(part, alike)
            members.append(
                Member(
                    index=index,
                    dice=dice_of(index, param),
                    group=number,
                    settings=groups[number],
                    whole=param,
                    param=part,
                    state=state.get(param, {}),
                    moments=moments,
                    alike=alike,
                    master=moments.get(self._algorithm.master),
                    grad_dtype=like.dtype,
                    pair=PAIRS[stepped, like.dtype, state_dtype],
                    shape=part.shape,
                    stride=part.stride(),
                )
            )
        if not disjoint([member.param for member in members]):
            self.left.append("two parameters share memory")
            self._leave_unbegun()
            members = []
        for place, some in by_device(members).items():
            lineup = Lineup(self._algorithm, some, self._structs(place))
            self._adopt(lineup)
            self._lineups.append(lineup)
        self._unbegun.clear()
        inside = {member.index for member in members}
        self._outside = [
            (index, groups[number]) for index, number in enumerate(numbers) if index not in inside
        ]
        self._entries = Entries(state, [member.whole for member in members if member.moments])
        self._params = params
        self._moments = list(map(self._algorithm.moments, groups))
        self._sizes = [len(group["params"]) for group in groups]
        return True

    def _prepare(self, factors: Factors) -> bool:
        """Has all compiled that this step launches, while nothing is changed yet.

        Returns:
            Whether it is. While a graph is captured nothing can be loaded: to try may break the capture.
        """
        unscales = self._unscales(factors)
        if unscales in self._prepared:
            return True
        if any(lineup.table.is_captured() for lineup in self._lineups):
            self._leave_to_the_graph("no step was made before that divides its gradients as this one does")
            return False
        for lineup in self._lineups:
            lineup.prepare(unscales=unscales)
        self._prepared.add(unscales)
        return True

    def _leave_to_the_graph(self, reason: str) -> None:
        """Has torch's own step captured, which may count steps in the memory of tables that there are."""
        self.left.append(f"a CUDA graph is captured, and {reason}")
        for lineup in self._lineups:
            keep_for_graphs(lineup.table.steps_N)

    def _give_up(self, error: Exception) -> None:
        """The optimizer is torch's from now on, in the same state; so is what was not launched of this
        step."""
        self.release()
        self._leave_unbegun()
        self.broken.append(str(error))
        self.left = [*self.broken]
        name = type(self._optimizer).__name__
        warnings.warn(
            f"kernels: {error}\nTraining goes on with torch's {name}.", RuntimeWarning, stacklevel=3
        )

    def _unscales(self, factors: Factors) -> bool:
        return factors.grad_scale is not None and self.unscales_in_memory and self._algorithm.unscales

    def _is_current(self, params: list[torch.Tensor], grads: Grads) -> bool:
        return (
            self._entries is not None
            and self._entries.are_in(self._optimizer.state)
            and [len(group["params"]) for group in self._optimizer.param_groups] == self._sizes
            and all(map(is_, params, self._params))
            and list(map(self._algorithm.moments, self._optimizer.param_groups)) == self._moments
            and all(lineup.is_current(self._structs(lineup.place)) for lineup in self._lineups)
            and not any(
                (grad := grads[index]) is not None and not self._why_misfit(params[index], grad, group)
                for index, group in self._outside
            )
        )

    def _create(self, group: Mapping[str, Any], param: torch.Tensor) -> None:
        """The state of one parameter as torch makes it at the first step with a gradient."""
        names = self._algorithm.moments(group)
        if not names or (self._optimizer.state[param] and not self._algorithm.starts_from_gradient):
            return
        state, count = self._optimizer.state[param], {}
        if self._algorithm.counts_steps:
            none = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            count = {"step": own_count(none, group, param)}
        made = {
            name: self._algorithm.make(place, param)
            for place, name in enumerate(names)
            if state.get(name) is None
        }
        if self._algorithm.master in self._algorithm.held(group, param):
            made[self._algorithm.master] = made_from(param)
        state.update(**count, **made)  # all or, where memory is short, nothing
        if made:
            self._unbegun[id(state)] = state, names

    def _leave_unbegun(self) -> None:
        """Takes back the states that torch's own step would take for those of an earlier one."""
        if not self._algorithm.counts_steps:
            for state, names in self._unbegun.values():
                for name in names:
                    state.pop(name, None)
        self._unbegun.clear()

    def _adopt(self, lineup: Lineup) -> None:
        """Hands the counts of steps to the table; views of it take their place."""
        if self._algorithm.counts_steps:
            lineup.adopt([member.state["step"] for member in lineup.members])
            lineup.counts = lineup.table.steps_N.unbind()
            for member, count in zip(lineup.members, lineup.counts, strict=True):
                if member.settings.get("capturable"):
                    keep_for_graphs(member.state["step"])
                member.state["step"] = count
        else:
            lineup.adopt([self._taken_by(member) for member in lineup.members])

    def _taken_by(self, member: Member) -> float:
        """Steps of a member whose state does not count them. 0 says that its first is still to come."""
        begun = id(member.state) not in self._unbegun
        return max(1.0, self._taken.get(member.index, 0.0)) if begun else 0.0

    def _groups_of(self, places: Container[int]) -> list[dict[str, Any]]:
        """The groups, as if they held only the parameters at these places."""
        found, index = [], 0
        for group in self._optimizer.param_groups:
            params = [param for place, param in enumerate(group["params"], index) if place in places]
            index += len(group["params"])
            if params:
                found.append({**group, "params": params})
        return found

    def _prepare_for_torch(self, grads: list[torch.Tensor], factors: Factors) -> bool:
        """Does to gradients what torch's own step expects to be done.

        Returns:
            Whether the step takes place: not if a `GradScaler` has found an infinity.
        """
        if not self.left:
            self.left = ["a gradient lies in memory in another order than its parameter"]
        found_inf = getattr(self._optimizer, "found_inf", None) if self.scaling_is_ours else None
        if found_inf is not None and found_inf.item():
            return False
        factors.carry_out(grads)
        return True

    def _launch(self, lineup: Lineup, factors: Factors) -> None:
        lineup.step(
            self._structs(lineup.place),
            grad_scale=at(lineup.place, factors.grad_scale),
            found_inf=at(lineup.place, getattr(self._optimizer, "found_inf", None)),
            clip_coef=at(lineup.place, factors.clip_coef),
            unscales=self._unscales(factors),
        )

    def _why_misfit(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> str:
        """Why no kernel can update a parameter with this gradient, in words; empty if one can."""
        if is_sharded(param) and not self._algorithm.by_element:
            return "a parameter is sharded, and its elements are not updated each by itself"
        state = self._optimizer.state.get(param, {})
        found = [state.get(name) for name in self._algorithm.held(group, param)]
        parts = [own_part(moment) for moment in found if isinstance(moment, torch.Tensor)]
        return why_misfit(self._algorithm, own_part(param), grad, self._algorithm.alike(parts))

    def _structs(self, place: torch.device) -> list[Group]:
        structs = [group_struct(self._algorithm, group, place) for group in self._optimizer.param_groups]
        for struct in structs if self.stochastic else ():
            struct.flags |= GroupFlag.STOCHASTIC
        return structs


def own_count(count: torch.Tensor, group: Mapping[str, Any], param: torch.Tensor) -> torch.Tensor:
    """A count of steps as torch keeps it: on the device if the step is fused or capturable."""
    on_device = group.get("fused") or group.get("capturable")
    return count.detach().clone().to(param.device if on_device else "cpu")
