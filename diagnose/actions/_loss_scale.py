"""Loss scaling inside the model's boundary, invisible to the loop.

What the gradient of an output is multiplied with on its way in, the gradients of the parameters and of the
inputs are divided by on their way out. So everything that the script sees is the true gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import distributed

from diagnose.actions._careful import Failure
from diagnose.actions._nested import mapped, tensors
from diagnose.actions._optimizers import parameters_of
from diagnose.actions._untouched import is_ours
from diagnose.actions.base import CannotApply
from diagnose.core.job import Route
from diagnose.hooks.base import replaced

GROWTH, GROWTH_STEPS = 2.0, 2000
"""As `torch.amp.GradScaler` has them."""

FIRST_SCALE, FIRST_GROWTH_STEPS = 2.0**10, 100
"""Lower than its 65536, and growing faster until something overflows: a numerics check that overflows is no
skipped step but a refusal."""

Hook = Callable[[torch.Tensor | None], torch.Tensor | None]
"""Of a tensor. It gets no gradient where the loss leaves out what the tensor was computed together with."""

OUTPUT = "diagnose: inputs of the model whose output this is"
"""Key in the metadata of the graph's nodes."""


class LossScale:
    """A scale that halves when a gradient overflows, and doubles when none has for long.

    Args:
        device: Where the models are.
        failure: Where the reason goes if the loop turns out to use the models in a way that this cannot
            follow. Gradients are then computed without a scale, at once.

    Attributes:
        scale: What gradients inside the models are multiplied with.
        num_skipped: Optimizer steps left out because a gradient was not finite.
    """

    def __init__(self, device: str, failure: Failure) -> None:
        self.scale = FIRST_SCALE
        self.num_skipped = 0
        self._failure = failure
        self._inverse = torch.tensor(1 / FIRST_SCALE, device=device)
        self._overflows: dict[int, torch.Tensor] = {}
        self._stepping: dict[int, ref[Any]] = {}
        self._good_steps = 0
        self._growth_steps = FIRST_GROWTH_STEPS
        self._params: dict[int, ref[torch.Tensor]] = {}

    @contextmanager
    def installed(self, models: list[Any], optimizers: list[Any]) -> Iterator[None]:
        """Unscales the gradients of the models' parameters while open, and skips bad steps.

        Raises:
            CannotApply: See `refuse_hooked`.
        """
        with ExitStack() as stack:
            self._hang_on(models, optimizers, stack)
            del models, optimizers
            stack.enter_context(replaced(torch.autograd, "backward", self._checking))
            yield

    def _hang_on(self, models: list[Any], optimizers: list[Any], stack: ExitStack) -> None:
        params = {id(p): p for model in models for p in model.parameters() if p.requires_grad}
        refuse_hooked(params.values())
        by_param = {}
        for optimizer in optimizers:
            self._overflows[id(optimizer)] = torch.zeros_like(self._inverse)
            self._stepping[id(optimizer)] = ref(optimizer)
            by_param.update({id(p): id(optimizer) for p in parameters_of(optimizer)})
        stack.callback(self._stepping.clear)
        unowned = torch.zeros_like(self._inverse)
        for param in params.values():
            overflow = self._overflows.get(by_param.get(id(param), 0), unowned)
            stack.callback(param.register_hook(self._unscaled_into(overflow)).remove)
        for optimizer in optimizers:
            skipped = _SkippedStep(self)
            stack.callback(skipped.restore)
            stack.callback(optimizer.register_step_pre_hook(skipped.before).remove)
            stack.callback(optimizer.register_step_post_hook(skipped.after).remove)
        self._params = {key: ref(param) for key, param in params.items()}
        stack.callback(self._params.clear)

    def through(self, route: Route) -> Route:
        """Returns a route that scales the gradients of what another one returns."""

        def scaled(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            entries: list[Any] = []

            def enter(tensor: torch.Tensor) -> torch.Tensor:
                if not tensor.requires_grad:
                    return tensor
                alias = tensor.view_as(tensor)  # the script may use the tensor elsewhere, too
                alias.register_hook(_times(lambda: 1 / self._factor()))
                entries.append(alias.grad_fn)
                return alias

            args = (args[0], *mapped(enter, args[1:]))
            result = route(call, args, mapped(enter, kwargs))
            for output in tensors(result):
                if output.grad_fn is not None:
                    _metadata(output.grad_fn)[OUTPUT] = entries
                    output.register_hook(_times(self._factor))
            return result

        return scaled

    def overflowed(self, optimizer: Any) -> tuple[bool, bool]:
        """Returns whether a step must be left out, and whether the scale was too large since the last one.
        Waits for the device.

        With several ranks what has overflowed on one goes into the average that all step with. So they
        decide by what is in `.grad` now, which is the same for all of them. Their scales need not be:
        nobody sees those.
        """
        overflow = self._overflows.get(id(optimizer))
        if overflow is None:
            return False, False
        if not _are_several():
            found = bool(overflow.item())
            return found, found
        step, own = torch.stack([_is_not_finite(optimizer, overflow), overflow]).tolist()
        return bool(step), bool(step or own)

    def adapt(self, optimizer: Any, overflowed: bool) -> None:
        """Chooses the next scale after a step."""
        if id(optimizer) not in self._overflows:
            return  # a numerics check steps with a copy
        if overflowed:
            self._overflows[id(optimizer)].zero_()
            self._good_steps = 0
            self._growth_steps = GROWTH_STEPS
            self.scale /= GROWTH
        else:
            self._good_steps += 1
            if self._good_steps < self._growth_steps:
                return
            self._good_steps = 0
            self.scale *= GROWTH
        self._inverse.fill_(1 / self._factor())

    def give_up(self, reason: str) -> None:
        """Scales no more."""
        self._failure.reason = reason
        self._inverse.fill_(1.0)

    def _factor(self) -> float:
        return 1.0 if self._failure.reason else self.scale

    def _unscaled_into(self, overflow: torch.Tensor) -> Hook:
        def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:
                return None
            if gradient.layout is not torch.strided or gradient.requires_grad:
                return gradient * self._inverse
            unscaled = gradient.clone()
            torch._amp_foreach_non_finite_check_and_unscale_([unscaled], overflow, self._inverse)
            return unscaled

        return hook

    def _checking(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Looks, before each backward pass, whether a parameter gets gradients past the models' outputs: a
        penalty on weights, say. Those would be divided by a scale that they never had.

        Where all gradients of an optimizer were thrown away, as those that a GAN's generator leaves in its
        critic are, what overflowed among them is forgotten. Where the optimizer itself was, the steps of
        another one could not be left out."""

        def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            if not self._failure.reason and self._params and self._reached(roots):
                self.give_up("the loop uses a parameter, or an inner result of a model, outside the model")
            for number, alive in self._stepping.items():
                optimizer = alive()
                if optimizer is None:
                    self.give_up("the script has put another optimizer in place of the one it had")
                elif all(p.grad is None for p in parameters_of(optimizer)):
                    self._overflows[number].zero_()
            return backward(tensors, *args, **kwargs)

        return checked

    def _reached(self, roots: list[torch.Tensor]) -> bool:
        ahead = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen = set(ahead)
        while ahead:
            node = ahead.pop()
            variable = getattr(node, "variable", None)
            known = self._params.get(id(variable))
            if known is not None and known() is variable:
                return True
            entries = _metadata(node).get(OUTPUT)
            after = (
                node.next_functions
                if entries is None
                else [edge for entry in entries for edge in entry.next_functions]
            )
            for following, _ in after:
                if following is not None and following not in seen:
                    seen.add(following)
                    ahead.append(following)
        return False


def _times(factor: Callable[[], float]) -> Hook:
    return lambda gradient: None if gradient is None else gradient * factor()


def refuse_hooked(params: Iterable[torch.Tensor]) -> None:
    """Raises `CannotApply` if the script has hooks on a parameter: they run before ours, on gradients that
    are still multiplied, and one that clips them clips others than it should."""
    for p in params:
        if not all(map(is_ours, (p._backward_hooks or {}).values())):
            raise CannotApply("the script has hooks on parameters: they would get multiplied gradients")


def _are_several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_not_finite(optimizer: Any, like: torch.Tensor) -> torch.Tensor:
    """1 if the gradients that an optimizer steps with are not all finite, else 0; on the device."""
    held = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    dense = [grad.detach() for grad in held if grad.layout is torch.strided and grad.numel()]
    if not dense:
        return torch.zeros_like(like)
    largest = torch._foreach_norm(dense, float("inf"))
    return torch.stack([each.to(like) for each in largest]).isfinite().all().logical_not().to(like)


def _metadata(node: Any) -> dict[Any, Any]:
    """What Python can note on a node of the graph; it lives as long as the node."""
    return node.metadata  # type: ignore[no-any-return]


class _SkippedStep:
    """Leaves a step of one optimizer out by hiding the gradients from it: parameters without one are passed
    over, and `step` remains the script's own."""

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._overflowed = False

    def before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step."""
        self.restore()
        if len(args) > 1 or kwargs:
            self._scale.give_up("the loop steps with a closure, which cannot be skipped")
        skips, self._overflowed = self._scale.overflowed(optimizer)
        if skips:
            self._scale.num_skipped += 1
            for p in parameters_of(optimizer):
                if p.grad is not None:
                    self._hidden.append((p, p.grad))
                    p.grad = None

    def after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a step."""
        self.restore()
        self._scale.adapt(optimizer, self._overflowed)

    def restore(self) -> None:
        """Gives the parameters their gradients back."""
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden.clear()
