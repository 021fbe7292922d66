"""An optimizer of which each rank keeps the state, and makes the step, of its share of the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import main_thread
from typing import Any

import torch
from torch import distributed
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from diagnose.actions._optimizers import parameters_of
from diagnose.actions._zero_peers import Peers, Share, described, made, tensors
from diagnose.actions.base import CannotApply
from diagnose.kernels._swap import COPIED

COALESCED_BYTES = 32 << 20
"""Sent at once: enough for any link, and little beside what is saved."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Shares:
    """One optimizer of a job of several ranks. Made on all of them at the same step.

    Before each step the ranks meet, so that none changes its share while another one, which has not come to
    the step yet, may ask for it.

    Args:
        group: The process group of the model.

    Raises:
        CannotApply: If weights or states differ between the ranks; on all of them.
    """

    def __init__(self, optimizer: Optimizer, group: Any) -> None:
        self._optimizer = optimizer
        self._group = group
        self._params = [p for p in parameters_of(optimizer) if p.requires_grad]
        self._steps = 0
        self._is_at_rest = True
        self._is_shared = False
        self._done: Any = None
        self._peers = Peers(self._shown)
        owners = split([p.numel() for p in self._params], self._peers.num)
        self._owner = {id(p): owner for p, owner in zip(self._params, owners, strict=True)}
        self._refuse_different()

    def _refuse_different(self) -> None:
        held = [self._params, *(list(self._optimizer.state.get(p, {}).values()) for p in self._params)]
        sums = [digest(t) for each in held for t in each if isinstance(t, torch.Tensor)]
        for values in ([len(sums)], sums):
            alike = {
                tuple(each.tolist()) for each in self._peers.gathered(torch.tensor(values, device="cpu"))
            }
            if len(alike) > 1:
                raise CannotApply("weights or the optimizer's state are not the same on all ranks")

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Lets the other ranks ask for this one's share while open."""
        with self._peers.serving():
            yield

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Shares the state while open. Leaving, on all ranks at the same step, makes it whole on each."""
        optimizer = self._optimizer
        with ExitStack() as stack:
            stack.callback(self._make_whole)
            stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            stack.callback(optimizer.register_step_post_hook(self._after_step).remove)
            stack.callback(optimizer.register_state_dict_post_hook(self._as_saved).remove)
            stack.callback(optimizer.register_load_state_dict_post_hook(self._loaded).remove)
            stack.callback(optimizer.__dict__.pop, COPIED, None)
            setattr(optimizer, COPIED, self._as_copied)
            self._is_shared = True
            self._drop()
            yield

    # -- the steps

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hands torch's own `step` an optimizer of this rank's share only."""
        if is_dynamo_compiling() or optimizer is not self._optimizer:
            return None
        self._peers.meet()
        self._is_at_rest = False
        alone: Any = object.__new__(type(optimizer))
        vars(alone).update(vars(optimizer))  # the state is the optimizer's own
        alone.param_groups = [
            {**group, "params": [p for p in group["params"] if self._is_own(p)]}
            for group in optimizer.param_groups
        ]
        return (alone, *args[1:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Sends each parameter from the rank that has made its step to all."""
        if is_dynamo_compiling() or optimizer is not self._optimizer:
            return
        for rank in range(self._peers.num):
            theirs = [p.detach() for p in self._params if self._owner[id(p)] == rank]
            self._broadcast(theirs, rank)
        if self._params[0].is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()
        self._steps += 1
        self._is_at_rest = True

    def _broadcast(self, sent: list[torch.Tensor], rank: int) -> None:
        if sent:
            broadcast: Any = distributed._broadcast_coalesced  # type: ignore[attr-defined]
            broadcast(self._group, sent, COALESCED_BYTES, rank)

    def _is_own(self, p: torch.Tensor) -> bool:
        """A parameter that has been added since has its state on every rank."""
        return self._owner.get(id(p), self._peers.rank) == self._peers.rank

    def _drop(self) -> None:
        for p in self._params:
            if not self._is_own(p):
                self._optimizer.state.pop(p, None)

    def _own(self) -> Share:
        state = self._optimizer.state
        return [
            (place, state[p])
            for place, p in enumerate(self._params)
            if p in state and self._owner[id(p)] == self._peers.rank
        ]

    def _shown(self, steps: int) -> Share | None:
        if self._steps < steps or not self._is_at_rest:
            return None
        if self._done is None:
            return self._own()
        with torch.cuda.stream(torch.cuda.Stream(self._params[0].device)):
            torch.cuda.current_stream().wait_event(self._done)
            return [
                (place, {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in state.items()})
                for place, state in self._own()
            ]

    # -- what the script sees of it

    def _others(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {self._params[place]: state for place, state in self._peers.ask(self._steps)}

    def _as_saved(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
        """The script asks for the state, perhaps on this rank alone."""
        if optimizer is not self._optimizer:
            return None
        places = {id(p): n for n, p in enumerate(parameters_of(optimizer))}
        others = {places[id(p)]: state for p, state in self._others().items()}
        state = {**saved["state"], **others}
        return {**saved, "state": {place: state[place] for place in sorted(state)}}

    def _as_copied(self) -> dict[str, Any]:
        """Takes the place of `Optimizer.__getstate__`: a copy has none of our hooks, and must be whole."""
        held: dict[str, Any] = type(self._optimizer).__getstate__(self._optimizer)
        return {**held, "state": self._in_order({**held["state"], **self._others()})}

    def _loaded(self, optimizer: Optimizer) -> None:
        """The script has loaded a checkpoint."""
        self._drop()

    def _in_order(self, state: dict[Any, Any]) -> defaultdict[Any, Any]:
        first = {p: state[p] for p in parameters_of(self._optimizer) if p in state}
        return defaultdict(dict, {**first, **state})

    # -- the way back

    def _make_whole(self) -> None:
        """Gives this rank the states that it has dropped.

        Raises:
            RuntimeError: If a rank that has some is gone.
        """
        if not self._is_shared:
            return
        self._is_shared = False
        if not main_thread().is_alive():  # the script has ended; others may ask for this share yet
            self._peers.leave()
            return
        if not distributed.is_initialized():  # it has done with training
            return
        own = self._own()
        try:
            texts = self._peers.together(described(own))
        except RuntimeError:  # some rank is held up: it answers beside what it does
            others = self._others_here(own)
        else:
            others = self._sent(own, texts)
        state = self._in_order({**self._optimizer.state, **others})
        self._optimizer.state.clear()
        self._optimizer.state.update(state)

    def _sent(self, own: Share, texts: list[str]) -> dict[torch.Tensor, dict[str, Any]]:
        """Sends this rank's share to all others, and returns theirs."""
        others = {}
        for rank, text in enumerate(texts):
            share = own if rank == self._peers.rank else made(text, self._params[0].device)
            self._broadcast([tensor.detach() for tensor in tensors(share)], rank)
            others.update({self._params[place]: state for place, state in share})
        return others

    def _others_here(self, own: Share) -> dict[torch.Tensor, dict[str, Any]]:
        """Asks the others for their shares, and brings them to where this rank has its own."""
        device = self._params[0].device
        names = {
            name
            for _, state in own
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.device == device
        }
        return {
            p: {name: value.to(device) if name in names else value for name, value in state.items()}
            for p, state in self._others().items()
        }


def split(sizes: list[int], num: int) -> list[int]:
    """Deals things out to ranks, the largest first, each to the one that has least.

    Returns:
        The rank that has each.
    """
    loads, owners = [0] * num, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def digest(tensor: torch.Tensor) -> int:
    """Returns a sum over the bits of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return int(flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64))
