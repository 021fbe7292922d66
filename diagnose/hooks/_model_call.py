"""A call of a model: of which parameters, in which mode, with which samples."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diagnose.hooks._contents import Contents

Switches = Mapping[int, tuple[bool, tuple[object, ...]]]
"""By module, its mode and whatever else is switched: a model whose adapters are disabled for a moment is
another model."""


@dataclass(frozen=True, slots=True)
class Part:
    """The parameters of a module that is called."""

    module: weakref.ref[Any]
    parameters: frozenset[int]
    size: int


@dataclass(slots=True)
class Call:
    """One outermost call of a model, or of a part of one, with samples.

    Attributes:
        part: Its parameters.
        switches: How its modules were switched.
        has_grad: Whether gradients were on.
        training: Whether it was in training mode.
        step: The step in which it was.
        num_updates: How often optimizers had stepped before it.
        contents: What it was given.
        given: The first tensor of that.
        site: The line that called.
        work: About what it computes, in numbers that are comparable with each other alone.
    """

    part: Part
    switches: Switches
    has_grad: bool
    training: bool
    step: int
    num_updates: int
    contents: Contents
    given: weakref.ref[torch.Tensor]
    site: tuple[int, int] | None
    work: float

    @property
    def is_there(self) -> bool:
        """Whether what stands for its contents still does: the memory of one that was not read may be
        another's by now."""
        return self.contents.is_read or self.given() is not None

    def covers(self, other: Call) -> bool:
        """Whether what another call computes of the same samples, this one computes, too."""
        if not self.is_there:
            return False
        if other.part is not self.part and not other.part.parameters <= self.part.parameters:
            return False
        differing = other.switches.items() if other.switches is not self.switches else ()
        for module, (mode, rest) in differing:
            known = self.switches.get(module)
            if known and (known[1] != rest or (other.training and known[0] != mode)):
                return False
        return self.training or not other.training


def is_same(before: Call, call: Call) -> bool:
    """Whether a call without gradients and the next one, with them, are of the same tensor as a whole. Of
    the same samples, put together in another way, they may be how a policy acts and then learns."""
    whole = before.contents.whole
    return (
        whole is not None
        and whole == call.contents.whole
        and call.contents.beside.keys() >= set(before.contents.rows)
        and before.contents.beside[whole] == call.contents.beside[whole]  # no output of a first pass
        and (before.step, before.num_updates) == (call.step, call.num_updates)
        and call.training
        and before.is_there
        and call.covers(before)
    )


def asks_gradient(call: Call) -> bool:
    """Whether a gradient of the samples themselves is asked for, as for an attack: no metric needs it."""
    given = call.given()
    return given is not None and given.is_leaf and given.requires_grad


def switches_of(model: Any) -> Switches:
    """How the modules are switched."""
    return {
        id(module): (
            module.training,
            tuple(
                value
                for name, value in vars(module).items()
                if type(value) in (bool, str) and name != "training"
            ),
        )
        for module in model.modules()
    }
