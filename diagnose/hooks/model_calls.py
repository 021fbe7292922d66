"""With what the models are called, looked at in a few steps."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch

from diagnose.hooks._batch import first_tensor
from diagnose.hooks._contents import MOST_KEPT, MOST_ROWS, Key, contents_of
from diagnose.hooks._frames import USER, owner, resolve, user_frame, value_of
from diagnose.hooks._looks import added
from diagnose.hooks._model_call import Call, Part, Switches, asks_gradient, is_same, switches_of
from diagnose.hooks._padding import MaskedPadding, Padding, padding_beside, padding_in, tensors_in
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

LOOKED_AT = 5
"""Steps that are counted, after one in which it is only learnt what is trained on."""

MOST_CALLS = 512
"""Of the calls of one step so many are looked at: a look takes 30 us, and 200 us at a large batch."""

MOST_KEPT_OF = 8
"""Of so many first ones, where they train, more samples are kept."""

FRESH = 0.5
"""Part of a batch that no other step has trained on, where it is a batch: the samples of a small data set,
or of one that is drawn with replacement, come again within a few steps."""

MOST_ALIKE = 8
"""Calls that are remembered with one sample."""

AFTER, JUDGED, BEFORE = "repeated", "judged", "repeated_before"
WITH_GRAD, JUDGED_WITH_GRAD = "repeated_with_grad", "judged_with_grad"
"""Calls for nothing, by how they lie to the one that trained, as the facts name them: without gradients
after it, in training mode or in evaluation mode; without gradients before it; with gradients after it, in
either mode."""


class ModelCallsHook(Hook):
    """Looks at the inputs of the training models in a few steps, where the forward hook sees them."""

    requires = "torch.nn.modules.module"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        looks, looking = recorder.looks, ExitStack()

        def inspect() -> None:
            looking.close()  # what a forked child finds here is its parent's
            look = _Look(recorder, looking.close)
            looking.enter_context(added(looks.on_forward, look.see))
            looking.enter_context(added(looks.on_batch, look.note_loaded))

        with looking, added(looks.inspections, inspect):
            yield


class _Look:
    """The few steps.

    Args:
        recorder: Gets what is learnt of them.
        goes: Called after the last of them.
    """

    def __init__(self, recorder: Recorder, goes: Callable[[], None]) -> None:
        self._recorder, self._goes = recorder, goes
        models = [model for model in recorder.met.live_modules() if _has_parameters(model)]
        self._models = {id(model) for model in models}
        self._trained = frozenset(id(parameter) for model in models for parameter in model.parameters())
        self._parts: dict[int, Part] = {}
        self._switches: dict[int, Switches] = {}
        self._passes = 0
        self._untrained = 0
        self._free = 0
        self._free_rows: list[int] = []
        self._first_step = self._step = recorder.steps
        self._calls_left = MOST_CALLS
        # What was trained on in this step and in the one before, which may end only with its optimizer's.
        self._trained_on: list[dict[Key, list[Call]]] = [{}, {}]
        self._first_on: dict[Key, Call] = {}
        self._last_on: dict[Key, int] = {}
        self._last: dict[int, Call] = {}
        self._counts = dict.fromkeys((AFTER, JUDGED, BEFORE, WITH_GRAD, JUDGED_WITH_GRAD), 0)
        self._sites: dict[str, tuple[int, int] | None] = {}
        self._begun: tuple[str, int, Call] | None = None  # how a method began again, whose, and the call
        self._works: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._padding: list[Padding] = []
        self._loaded: list[Padding] = []
        self._beside: list[Padding] = []
        self._batch: list[weakref.ref[torch.Tensor]] = []
        self._batch_size: int | None = None
        self._autocast: str | None = None

    def see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is about to be called; after the last of the steps, tells what was seen and goes."""
        steps = self._recorder.steps
        if steps - self._first_step > LOOKED_AT:
            self._goes()
            self._tell()
            return
        if steps != self._step:
            if self._step == self._first_step:
                self._passes = self._recorder.passes_beside
            self._step, self._calls_left = steps, MOST_CALLS
            self._trained_on = [{}, self._trained_on[0]]
        counts = steps > self._first_step
        has_grad = torch.is_grad_enabled()
        is_model = id(module) in self._models
        tensor = first_tensor((*args, kwargs))
        if is_model and has_grad:
            self._note_batch(module, tensor, (*args, kwargs))
        part = self._part_of(module)
        if not part.parameters:
            return
        work = float(part.size * tensor.numel()) if tensor is not None else 0.0
        if not has_grad and counts:
            self._works[steps][""] += work
        if is_model or part.parameters <= self._trained:
            call = self._call(module, part, has_grad, (*args, kwargs), work)
            repeated = call is not None and self._is_repeated(call)
            if counts and is_model and not (has_grad or repeated) and module.training:
                self._free += 1
                if tensor is not None:
                    self._free_rows.append(len(tensor) if tensor.dim() > 1 else 1)
        elif not has_grad and self._is_another(module):
            self._untrained += counts

    def note_loaded(self, batch: Any) -> None:
        """A loader gave a batch: on a device nothing is asked of what the model gets of it."""
        self._batch = [weakref.ref(each) for each in tensors_in(batch)]
        padding = padding_in(batch)
        if padding is not None:
            self._loaded.append(padding)

    def _is_another(self, module: Any) -> bool:
        """Whether a module is a model, and has nothing of a trained one."""
        first = next(module.parameters(), None)
        return first is not None and id(first) not in self._trained

    def _note_batch(self, module: Any, tensor: torch.Tensor | None, given: Any) -> None:
        """A model is trained on this."""
        self._autocast = _autocast_dtype(next(module.parameters()).device.type)
        if tensor is None or not tensor.dim():
            return
        self._batch_size = len(tensor)
        there = (each() for each in self._batch)
        padding = padding_in(given, [each for each in there if each is not None])
        if padding is not None:
            self._padding.append(padding)
        elif (beside := padding_beside(given)) is not None:
            self._beside.append(beside)

    def _part_of(self, module: Any) -> Part:
        part = self._parts.get(id(module))
        if part is None or part.module() is not module:
            parameters = list(module.parameters())
            part = self._parts[id(module)] = Part(
                weakref.ref(module),
                frozenset(map(id, parameters)),
                sum(parameter.numel() for parameter in parameters),
            )
        return part

    def _call(self, module: Any, part: Part, has_grad: bool, given: Any, work: float) -> Call | None:
        """Returns what tells a call from others; `None` where it is not looked at."""
        keeps = has_grad and self._calls_left > MOST_CALLS - MOST_KEPT_OF
        most_rows = MOST_KEPT if keeps else MOST_ROWS
        contents = contents_of(given, most_rows) if self._calls_left > 0 else None
        self._calls_left -= 1
        if contents is None:
            return None
        switches = switches_of(module)
        known = self._switches.get(id(module))
        if known == switches:
            switches = known
        self._switches[id(module)] = switches
        tensor = first_tensor(given)
        assert tensor is not None
        return Call(
            part=part,
            switches=switches,
            has_grad=has_grad,
            training=module.training,
            step=self._step,
            num_updates=sum(self._recorder.met.stepped_times.values()),
            contents=contents,
            given=weakref.ref(tensor),
            site=user_frame(sys._getframe(2)),
            work=work,
        )

    def _is_repeated(self, call: Call) -> bool:
        """Notes a call; returns whether a model was trained on all that it is given just now."""
        repeated = self._is_known(call)
        before = self._last.pop(id(call.part), None)
        model = self._calling_model()
        if not self._goes_on(call, model):
            self._begun = None
        if call.has_grad:
            if repeated and (call.training or not asks_gradient(call)):
                self._count(WITH_GRAD if call.training else JUDGED_WITH_GRAD, call)
            if before is not None and is_same(before, call):
                self._count(BEFORE, before)
                self._free -= call.step > self._first_step and id(call.part.module()) in self._models
            self._remember(call)
        elif repeated:
            how = AFTER if call.training else JUDGED
            self._count(how, call)
            self._begun = self._begun or (how, model, call)
        elif self._begun is not None:
            self._works[call.step][self._begun[0]] += call.work
        elif call.training:
            self._last[id(call.part)] = call
        return repeated

    def _goes_on(self, call: Call, model: int) -> bool:
        """Whether a call is of a later layer in the method of a model that began with what was trained on.
        Where the first one is called again it is for something else."""
        if self._begun is None or call.has_grad:
            return False
        _, beginning, first = self._begun
        return model == beginning != 0 and call.step == first.step and call.part is not first.part

    def _calling_model(self) -> int:
        """Identity of the model in a method of which, such as `encode`, a part of it is called; else 0."""
        frame = sys._getframe(1)
        while frame is not None and owner(frame.f_code) != USER:
            frame = frame.f_back  # type: ignore[assignment]
        is_method = frame is not None and frame.f_code.co_varnames[:1] == ("self",)
        model = value_of(frame, "self") if is_method else None
        return id(model) if id(model) in self._recorder.met.models else 0

    def _count(self, how: str, call: Call) -> None:
        if call.step == self._first_step:
            return
        self._counts[how] += 1
        self._sites[how] = call.site
        self._works[call.step][how] += call.work

    def _is_known(self, call: Call) -> bool:
        """Whether all samples of a call were trained on just now, by a model that it is a part of."""
        covering: dict[int, bool] = {}

        def is_known(key: Key) -> bool:
            for trained_on in self._trained_on:
                for before in trained_on.get(key, ()):
                    if id(before) not in covering:
                        covering[id(before)] = before.covers(call)
                    here, there = (each.contents.beside[key] for each in (call, before))
                    if covering[id(before)] and here <= there:
                        return True
            return False

        contents = call.contents
        keys = contents.rows or (contents.whole,)
        known = [key for key in keys if key is not None and is_known(key)]
        if len(known) < len(keys):
            return False
        # In evaluation mode, what every step trains on is evaluated: it is the whole data set.
        fresh = sum(self._first_on[key].step == self._last_on[key] for key in known)
        return call.training or fresh >= FRESH * len(known)

    def _remember(self, call: Call) -> None:
        for key in {*call.contents.rows, call.contents.whole}:
            if key is not None:
                if key not in self._first_on or not self._first_on[key].is_there:
                    self._first_on[key] = call
                self._last_on[key] = call.step
                calls = self._trained_on[0].setdefault(key, [])
                if len(calls) < MOST_ALIKE:
                    calls.append(call)

    def _tell(self) -> None:
        site = next((self._sites[how] for how in self._counts if self._sites.get(how) is not None), None)
        file, line = resolve(*site)[:2] if site is not None else ("", 0)
        padded = self._padding or self._loaded or self._beside
        tokens = sum(batch.tokens for batch in padded)
        # What goes backward in an evaluation, and not in training, has used what was called there.
        used = self._recorder.passes_beside - self._passes
        self._counts[JUDGED_WITH_GRAD] = max(0, self._counts[JUDGED_WITH_GRAD] - used)
        self._recorder.facts["calls"] = {
            "num_steps": LOOKED_AT,
            **{how: count / LOOKED_AT for how, count in self._counts.items()},
            "repeated_share": self._share(AFTER, JUDGED),
            "before_share": self._share(BEFORE),
            "untrained": self._untrained / LOOKED_AT,
            "free": self._free / LOOKED_AT,
            "free_rows": min(self._free_rows, default=None),
            "padding_share": sum(batch.padding for batch in padded) / tokens if tokens else None,
            "overlong_share": sum(batch.overlong for batch in padded) / tokens if tokens else None,
            "padded_tokens": tokens / len(padded) if padded else None,
            "padded_beside": bool(padded) and padded is self._beside,
            "padded_masked": any(isinstance(each, MaskedPadding) for each in padded),
            "batch_size": self._batch_size,
            "autocast_dtype": self._autocast,
            "file": file,
            "line": line,
        }

    def _share(self, *kinds: str) -> float | None:
        """Returns the part of what is computed without gradients in a usual step that these calls are."""
        shares = [sum(work[how] for how in kinds) / work[""] for work in self._works.values() if work[""]]
        return median(shares) if shares else None


def _has_parameters(model: Any) -> bool:
    return next(model.parameters(), None) is not None


def _autocast_dtype(device: str) -> str:
    """The type that autocast computes in on such a device, on this thread; empty where it is off."""
    if not torch.is_autocast_enabled(device):
        return ""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
