"""Steps of scripts that update their parameters themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

BY_HAND = 0
"""Stands for the identity of an optimizer; no object has it."""

CHANGES = 3
"""So often parameters have changed between two backward passes without an optimizer: the loop does it."""

MOST_PASSES = 512
"""A script that has neither stepped nor changed anything in so many passes accumulates gradients."""

MOST_NODES, MOST_LEAVES, NUMBERS = 4096, 32, 8
"""So much of a graph is walked, so many of its leaves are looked at, and so many numbers of each."""

Look = tuple[Any, tuple[str, ...], tuple[int, ...]]
"""A leaf's shape, some of its numbers (none on a device), and its version and address."""

NOTE = (
    "no optimizer of torch's {steps}, and the parameters change: a step ends with every {which}backward"
    " pass. {cause} If that is wrong: import diagnose; diagnose.step()"
)
STEPS = {
    False: {"steps": "steps here", "cause": "What updates them is code of the loop."},
    True: {
        "steps": "is seen to step here",
        "cause": "One was made; if its `step()` is compiled, it cannot be seen.",
    },
}
"""Words of the note, by whether an optimizer was made."""


class HandWrittenUpdatesHook(Hook):
    """Ends steps where the loop itself, or an optimizer that is not torch's, updates the parameters.

    Between the first backward passes it looks at a few numbers of a few leaves of the graph; on a device,
    for which it would have to wait, only at their versions.
    """

    requires = "torch.autograd"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        seen: dict[int, tuple[weakref.ref[Any], Look]] = {}
        changed_at: list[int] = []
        looks: list[Look] = []
        passes = period = 0
        met = recorder.met

        def on_pass(args: tuple[Any, ...]) -> None:
            nonlocal passes, period, looks
            finder = recorder.finder
            has_stepped = met.optimizers or (not period and (recorder.steps or finder.stepped))
            if has_stepped or finder.marked or (not period and passes > MOST_PASSES):
                recorder.looks.on_pass.remove(on_pass)
                return
            passes += 1
            if period:
                if passes % period == 0:
                    recorder.stepped_beside.append(BY_HAND)
                return
            variables = leaves(args[0] if args else ())
            last, looks = looks, [_look(variable) for variable in variables]
            if _have_changed(seen, variables, looks, last):
                changed_at.append(passes)
            if len(changed_at) >= CHANGES:
                gaps = [after - before for before, after in pairwise(changed_at)]
                period = min(gaps)
                which = f"{period}th " if period > 1 else ""
                recorder.notes.append(NOTE.format(which=which, **STEPS[met.optimizers_made]))
                passes = 0
                on_pass(args)

        with added(recorder.looks.on_pass, on_pass):
            yield


def leaves(roots: Any) -> list[Any]:
    """Returns some of the tensors whose gradients a backward pass from these computes."""
    found: list[Any] = []
    roots = roots if isinstance(roots, (tuple, list)) else [roots]
    pending = [getattr(root, "grad_fn", None) for root in roots]
    known = {id(node) for node in pending}
    while pending and len(known) < MOST_NODES and len(found) < MOST_LEAVES:
        node = pending.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        for following, _ in node.next_functions:
            if id(following) not in known:
                known.add(id(following))
                pending.append(following)
    return found


def _have_changed(
    seen: dict[int, tuple[weakref.ref[Any], Look]],
    variables: list[Any],
    looks: list[Look],
    last: list[Look],
) -> bool:
    """Whether most variables are others than when they were seen last; remembers how they are now. An
    attack on the inputs changes those alone, between its passes.

    Where none of them was there before, as after `w = (w - g).detach().requires_grad_()`, they are compared
    with those of the last pass, if they are several and of the same shapes.

    Args:
        seen: How each variable was, by identity.
        variables: Leaves of a pass.
        looks: How they are now.
        last: How those of the pass before were.
    """
    changed: list[bool] = []
    for variable, now in zip(variables, looks, strict=True):
        known = seen.get(id(variable))
        if known is not None and known[0]() is variable:
            changed.append(known[1] != now)
        seen[id(variable)] = weakref.ref(variable), now
    if not changed and len(looks) > 1 and [now[0] for now in looks] == [then[0] for then in last]:
        changed = [not now[1] or now[1] != then[1] for now, then in zip(looks, last, strict=True)]
    return 2 * sum(changed) > len(changed)


def _look(variable: Any) -> Look:
    import torch

    numbers: list[Any] = []
    if variable.device.type == "cpu" and variable.layout is torch.strided:
        flat = variable.detach().reshape(-1)
        numbers = flat[:: max(1, flat.numel() // NUMBERS)][:NUMBERS].tolist()
    in_functorch = torch._C._functorch.is_functorch_wrapped_tensor(variable)  # whose storage is another's
    place = () if in_functorch else (variable._version, variable.data_ptr())
    return variable.shape, tuple(map(repr, numbers)), place
