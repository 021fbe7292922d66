"""The live objects of the script that is being trained: the one thing here that is not plain data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

Route = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes the place of a model's call: gets what it replaces, `args` (the model first) and `kwargs`, and
returns what the script shall see."""


@dataclass(slots=True, kw_only=True)
class Job:
    """What actions work on. Only touched on the training thread, between two steps.

    Attributes:
        models: Modules that the loop calls outermost in training, in order of appearance; a loss may be
            among them.
        optimizers: Optimizers that have stepped.
        iterators: Iterators of `DataLoader`s that feed training now, the latest last.
        loaders: The `DataLoader` of each of `iterators`.
        inputs: `args` (without the model) and `kwargs` of the latest outermost training call, by
            `id(model)`. Tensors are the script's own, and may be changed in place by it.
        routes: By `id(model)`, what its outermost training-mode calls go through, first in, outermost.
        on_iterator: Called with loader and iterator when the loop has begun to iterate for training, before
            the first batch is asked for.
        on_step: Called between two steps, once after each; what they take counts as time of that step. Of
            what is told here only `steps` and `backward_passes` are of that step then.
        device: `cpu`, `cuda`, ... of the first parameter.
        torch_device: Its device in full, with the number of the GPU. `None`, which to torch is the current
            one, where nobody has looked.
        is_between: Whether the script has done with all that it has trained, and trains nothing yet.
        local_ranks: Training processes on this machine.
        facts: What the hooks have learnt, by name.
        steps: Steps that have ended.
        backward_passes: Outermost backward passes so far; 0, as with `steps`, where nobody counts.
        epoch_steps: Steps of the last whole epoch; 0 before one has ended.
        epochs_begun: How often the loop has begun to iterate for training.
        epochs_ended: How often the loop has asked for a batch beyond an epoch's last.
        steps_left: Returns about how many steps are still to come; `None` where nobody knows.
        unmeasured: Opens a context in which the hooks take no notice of model calls and optimizer steps:
            those of a numerics check are not the script's.
    """

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    iterators: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    routes: dict[int, list[Route]] = field(default_factory=dict)
    on_iterator: list[Callable[[Any, Any], None]] = field(default_factory=list)
    on_step: list[Callable[[], None]] = field(default_factory=list)
    device: str = "cpu"
    torch_device: Any = None
    is_between: bool = False
    local_ranks: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    backward_passes: int = 0
    epoch_steps: int = 0
    epochs_begun: int = 0
    epochs_ended: int = 0
    steps_left: Callable[[], int | None] = lambda: None
    unmeasured: Callable[[], AbstractContextManager[None]] = nullcontext
