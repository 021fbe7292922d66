"""What the training loop is made of, as the hooks met it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

from diagnose.hooks._frames import user_frame


class Met:
    """The modules that the loop calls, the optimizers that step, and the lines of the user's that call.

    Told by the hooks on the training thread, and while they look around only, but for modules in training
    mode. Nothing is kept alive.

    Attributes:
        models: References to the modules that were called in training mode, by identity, which another
            module may get later: see `was_trained`. The wrappers hold this dictionary.
        modules: Weak references to the modules called outermost in training, in order of appearance.
        optimizers: Likewise to the optimizers that stepped.
        optimizers_made: Whether any optimizer of torch's was made.
        stepped_times: How often each of them has stepped, by identity. Only ever grows: it is compared.
        sites: How often each line of the user's code asked for a batch, called a model, began a backward.
    """

    __slots__ = ("models", "modules", "optimizers", "optimizers_made", "sites", "stepped_times")

    def __init__(self) -> None:
        self.models: dict[int, weakref.ref[Any]] = {}
        self.modules: list[weakref.ref[Any]] = []
        self.optimizers: list[weakref.ref[Any]] = []
        self.optimizers_made = False
        self.stepped_times: dict[int, int] = {}
        self.sites: dict[tuple[str, int, int], int] = {}

    def clear(self) -> None:
        """Forgets the loop: a forked child may have another one."""
        self.models.clear()
        self.modules.clear()
        self.optimizers.clear()
        self.optimizers_made = False
        self.sites.clear()

    def live_modules(self) -> list[Any]:
        """Returns those of `modules` that still live."""
        return [module for known in self.modules if (module := known()) is not None]

    def live_optimizers(self) -> list[Any]:
        """Returns those of `optimizers` that still live."""
        return [optimizer for known in self.optimizers if (optimizer := known()) is not None]

    def model_appears(self, model: Any) -> None:
        """A module is called that has not been in training mode so far. In evaluation mode, one is trained
        if there is anything to train, as what `from_pretrained` makes; its `eval()` begins no evaluation.
        """
        if model.training:
            # `eval()` may be called on what DDP or `torch.compile` wraps.
            parts = (model, getattr(model, "module", None), getattr(model, "_orig_mod", None))
            held = [part for part in parts if hasattr(part, "training")]
            self.models.update((id(part), weakref.ref(part)) for part in held)
        elif not any(p.requires_grad for p in model.parameters()):
            return  # a teacher
        if all(known() is not model for known in self.modules):
            self.modules[:] = [known for known in self.modules if known() is not None]
            self.modules.append(weakref.ref(model))

    def optimizer_steps(self, optimizer: Any) -> None:
        """An optimizer steps."""
        self.stepped_times[id(optimizer)] = self.stepped_times.get(id(optimizer), 0) + 1
        if all(known() is not optimizer for known in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer))

    def site(self, kind: str) -> None:
        """Remembers which line of the user's code made this call.

        Args:
            kind: `next`, `forward`, `further`, `backward`, `optimizer` or `schedule`.
        """
        frame = user_frame(sys._getframe(1))
        if frame is not None:
            key = (kind, frame[0], frame[1])
            self.sites[key] = self.sites.get(key, 0) + 1


def was_trained(models: Mapping[int, weakref.ref[Any]], model: Any) -> bool:
    """Whether a module is one of `Met.models`. A bare one, such as a loss, that the loop makes for each
    step anew, counts as the one before, whose identity it mostly gets. Raises nothing: it goes unguarded.
    """
    known = models.get(id(model))
    if known is None:
        return False
    met = known()
    if met is not None:
        return met is model
    return not (getattr(model, "_parameters", True) or getattr(model, "_modules", True))
