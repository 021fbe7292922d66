"""Time in the outermost training-mode call of a model or a loss."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import FunctionType
from typing import Any
from weakref import ref

from diagnose.core.job import Route
from diagnose.core.ledger import EVALUATION, FIRST_GAP, FORWARD, GAP_AFTER, GAP_AFTER_EVALUATION
from diagnose.hooks._bare import Bare
from diagnose.hooks._batch import batch_size
from diagnose.hooks._imports import after_import
from diagnose.hooks._log import WIDTH
from diagnose.hooks._met import was_trained
from diagnose.hooks._padding import tensors_in
from diagnose.hooks._recorder import TRAINED, UNUSED, Recorder
from diagnose.hooks.base import THEN, Hook, hidden, replaced, spanned, unseen

GAP = GAP_AFTER[FORWARD]

KEEPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_initialize"),
    ("torch.autograd.profiler", "", "_prepare_profiler"),
    ("torch.autograd.profiler", "", "_enable_profiler"),
)
"""Module, owner and name of functions that keep the `nn.Module.__call__` that they find: `torch.compile` to
call it, the profiler to know the frames of modules by its code, once for the whole process."""

BY_VALUE = {
    "cloudpickle.cloudpickle": "_extract_class_dict",
    "joblib.externals.cloudpickle.cloudpickle": "_extract_class_dict",
    "ray.cloudpickle.cloudpickle": "_extract_class_dict",
    "pyspark.cloudpickle.cloudpickle": "_extract_class_dict",
    "dill._dill": "_get_typedict_type",
}
"""Modules that pickle a class of the script's with all that it holds, and the function of each that makes a
dict of that, and returns it alone or first."""

FX, FX_TRACES = "torch.fx._symbolic_trace", "_is_fx_tracing_flag"


class ForwardHook(Hook):
    """Charges the outermost module call to `forward`, or to `evaluation` when gradients are off.

    No module gets a hook of torch's: those split compiled graphs. Instead the *class* of each outermost
    module gets a `__call__` of its own, so that calls of submodules cost nothing. To find these classes,
    `nn.Module.__call__` itself is replaced at first, and only between outermost calls, so that
    neither submodules nor Dynamo ever meet it.

    The call of a loss module counts as `forward` too: it is an outermost training-mode call. That of a
    module which only prepares a batch, such as one that augments, counts so once. It has no parameters, and
    no gradient goes in or comes out; from then on it is the loop's own code like any other, and from the
    first call where gradients are off and nothing is evaluated. Not on a device, which may compute for
    one batch while the loop waits for another.
    """

    requires = "torch.nn.modules.module"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        with ExitStack() as adopted, _Search(recorder, adopted) as search:
            for module, owner, name in KEEPERS:
                adopted.callback(
                    after_import(module, functools.partial(search.steps_aside_for, module, owner, name))
                )
            for module, name in BY_VALUE.items():
                adopted.callback(after_import(module, functools.partial(search.keeps_out_of, module, name)))
            yield


class _Search:
    """Finds the classes of outermost modules and gives each its own `__call__`."""

    def __init__(self, recorder: Recorder, adopted: ExitStack) -> None:
        import torch
        from torch.compiler import is_compiling

        self._is_grad_enabled = torch.is_grad_enabled
        self._is_tracing = torch._C._is_tracing
        self._is_compiling = is_compiling
        self._module = torch.nn.Module
        self._compiled = torch.jit.ScriptModule  # where a frozen one's parameters are gone
        self._recorder = recorder
        self._on_forward = recorder.looks.on_forward
        self._adopted = adopted
        self._classes: dict[type, Any] = {}  # with what each had for a `__call__` of its own
        self._base: ExitStack | None = None
        self._listener: Any = None  # what is in place of `nn.Module.__call__` then
        self._beneath: Any = None  # and what it calls
        self._undecided = 0  # a module without parameters whose first result will tell what it is for
        self._preparing: dict[int, ref[Any]] = {}  # those that prepare batches, by identity
        self._bare = Bare()
        self._closed = False  # another library may hold our replacement and call it for ever

    def __enter__(self) -> _Search:
        self._listen()
        return self

    def __exit__(self, *exception: object) -> None:
        self._rest()
        self._closed = True

    def steps_aside_for(self, module: str, owner: str, name: str) -> None:
        """Lets `nn.Module.__call__` be torch's while such a function looks at it."""

        holder = sys.modules[module]
        owning = getattr(holder, owner) if owner else holder
        self._adopted.enter_context(replaced(owning, name, self._unheard))

    def _unheard(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            listening = self._base is not None
            self._rest()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                unseen(error)
                raise
            finally:
                if listening:
                    self._listen()

        return hidden(call)

    def _aside(self, original: Any) -> Any:
        """Calls a module that is none to measure: those in it are not heard either."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._rest()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                unseen(error)
                raise
            finally:
                if self._recorder.searching and not self._closed:
                    self._listen()

        return hidden(call)

    def keeps_out_of(self, module: str, name: str) -> None:
        """Lets a class be pickled by value as it is without us: ours leads to locks and open files."""

        def wrap(original: Any) -> Any:
            def call(cls: type, *args: Any) -> Any:
                found = original(cls, *args)
                members = found[0] if isinstance(found, tuple) else found
                if cls in self._classes and "__call__" in members:
                    own = self._classes[cls]
                    if own is None:
                        del members["__call__"]
                    else:
                        members["__call__"] = own
                return found

            return hidden(call)

        holder = sys.modules[module]
        if hasattr(holder, name):
            self._adopted.enter_context(replaced(holder, name, wrap))

    def _listen(self) -> None:
        if self._base is None:
            self._base = ExitStack()
            self._base.enter_context(replaced(self._module, "__call__", self._wrap_base))
            self._recorder.listening = True

    def _rest(self) -> None:
        if self._base is not None:
            base, self._base = self._base, None
            self._recorder.listening = False
            base.close()

    def _wrap_base(self, original: Any) -> Any:
        adopt, rest, is_traced = self._adopt, self._rest, self._is_traced
        from torch.compiler import is_dynamo_compiling

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(module, *args, **kwargs)
            inherits = type(module).__call__ is call
            if is_traced() or not adopt(type(module)):
                try:
                    return original(module, *args, **kwargs)
                except BaseException as error:
                    unseen(error)
                    raise
            rest()
            try:
                if inherits:
                    return type(module).__call__(module, *args, **kwargs)
                # A `__call__` of the class's own has begun, and has come here by `super()`.
                result = original(module, *args, **kwargs)
                self._listen()
                return result
            except BaseException as error:
                self._listen()  # which no `after` does now
                unseen(error)
                raise

        self._listener, self._beneath = hidden(call), original
        return self._listener

    def _base_call(self) -> Any:
        """What `nn.Module.__call__` is without us: torch's, or what `torch.fx` or the script put there."""
        now = self._module.__call__
        return self._beneath if now is self._listener else now

    def _adopt(self, cls: type) -> bool:
        """Gives a class its own `__call__` if one of its instances is being called outermost."""
        recorder = self._recorder
        if self._closed or cls in self._classes or not recorder.on_training_thread():
            return False
        if not recorder.outermost:
            return False
        own = self._classes[cls] = vars(cls).get("__call__")
        if not isinstance(own, FunctionType | None):
            return False  # a descriptor decides what is called
        self._rest()
        try:
            self._adopted.enter_context(replaced(cls, "__call__", self._wrap))
        except Exception:  # noqa: BLE001 (a metaclass of the script's may refuse)
            recorder.broke(self._adopt)
            self._listen()
            return False
        return True

    def _wrap(self, original: Any) -> Any:
        from torch.compiler import is_dynamo_compiling

        recorder, is_grad_enabled = self._recorder, self._is_grad_enabled
        clock, log, models = recorder.clock, recorder.log.append, recorder.met.models
        routes = recorder.routes
        module, base_call = self._module, self._base_call
        inherits = original is module.__call__

        def routed(*args: Any, **kwargs: Any) -> Any:
            through = routes.get(id(args[0]), ()) if recorder.current in (FORWARD, EVALUATION) else ()
            call = base_call() if inherits else original
            for route in reversed(through):
                if recorder.current == EVALUATION and not getattr(route, "everywhere", False):
                    continue
                call = functools.partial(_through, route, call)
            return call(*args, **kwargs)

        asked = spanned(original, recorder, self._before, self._after)
        tuned = spanned(hidden(routed), recorder, self._before, self._after)
        aside, prepares_again = self._aside(original), self._prepares_again

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(*args, **kwargs)
            interrupted = recorder.current
            if (
                interrupted < FIRST_GAP
                or get_ident() != recorder.calm
                or not is_grad_enabled()
                or (models.get(id(args[0]), _nothing)() is not args[0] and not was_trained(models, args[0]))
                or routes
                or (inherits and module.__call__ is not original)
            ):
                is_other = inherits and base_call() is not original
                try:
                    if is_other and interrupted == FORWARD:
                        return base_call()(*args, **kwargs)
                    if interrupted >= FIRST_GAP and not is_other and prepares_again(args, kwargs):
                        return aside(*args, **kwargs)
                    # A loop without a loader has its boundary in here, and there a route may be taken up.
                    if (routes or is_other or recorder.on_boundary is not None) and interrupted != FORWARD:
                        return tuned(*args, **kwargs)
                    return (original if interrupted == FORWARD else asked)(*args, **kwargs)
                except BaseException as error:
                    unseen(error)
                    raise
            recorder.batch_use = TRAINED
            try:
                recorder.current = FORWARD
                log(clock() * WIDTH + FORWARD)
                result = original(*args, **kwargs)
            except BaseException as error:
                recorder.leave(FORWARD, interrupted)
                unseen(error)
                raise
            recorder.current = GAP
            log(clock() * WIDTH + GAP)
            return result

        recorder.log.kept_by(call)
        return hidden(functools.wraps(original)(call) if isinstance(original, FunctionType) else call)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        recorder = self._recorder
        if not recorder.outermost or self._is_traced():
            return -1
        if self._base is not None:
            self._rest()
        module = args[0]
        if self._on_forward:
            for look in (*self._on_forward,):  # they may take themselves out
                recorder.guarded(look, module, args[1:], kwargs)
        without_grad = not self._is_grad_enabled() and not is_checkpointed()
        if without_grad or (recorder.evaluating and self._is_evaluated(module)):
            recorder.evaluation_begins(id(module))
            recorder.evaluated = recorder.evaluating
            return EVALUATION + THEN if recorder.searching else EVALUATION
        self._undecided = 0
        appears = (module.training or recorder.searching) and not was_trained(recorder.met.models, module)
        computed = _is_computed(args[1:], kwargs)
        if appears and not computed and next(module.parameters(), None) is None:
            self._undecided = id(module)
        else:
            self._preparing.pop(id(module), None)
            self._trains(module, "further" if computed else "forward", appears)
        recorder.batch_use = TRAINED
        recorder.forward_begins(module, lambda: batch_size(args[1:] or kwargs))
        if recorder.inputs is not None:
            recorder.inputs[id(module)] = (args[1:], kwargs)
        return FORWARD + THEN if recorder.searching or self._undecided else FORWARD

    def _trains(self, module: Any, kind: str, appears: bool) -> None:
        """A call of a model, or of a part of the loss."""
        if self._recorder.curious:
            self._recorder.met.site(kind)
        if appears:
            self._recorder.met.model_appears(module)

    def _is_evaluated(self, module: Any) -> bool:
        """Whether a call between `eval()` and `train()` evaluates: of a model, or of a loss, whose mode
        nobody switches. On a training batch that is in hand it may be an attack, which is training."""
        if self._recorder.batch_use == UNUSED:
            return False
        return not module.training or next(module.parameters(), None) is None

    def _after(self, args: tuple[Any, ...], result: Any) -> None:
        if self._recorder.searching:
            self._listen()
        module, undecided = args[0], self._undecided
        self._undecided = 0
        if id(module) != undecided:
            return
        tensors = [] if isinstance(module, self._compiled) else list(tensors_in(result))
        if tensors and not any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in tensors):
            self._preparing[undecided] = ref(module)
        else:
            self._preparing.pop(undecided, None)
            self._trains(module, "forward", appears=True)

    def _prepares_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a module that has prepared a batch is called for the next one, or without gradients for
        any."""
        module, recorder = args[0], self._recorder
        if recorder.evaluating or not recorder.on_training_thread() or self._is_traced():
            return False
        without_grad = not self._is_grad_enabled()
        if without_grad:
            if recorder.current == GAP_AFTER_EVALUATION:
                return False
        elif self._preparing.get(id(module), _nothing)() is not module:
            return False
        # Reading values of a mapping of the script's own may do anything, and this is its step.
        given = [
            each
            for each in (*args[1:], *kwargs.values())
            if not isinstance(each, Mapping) or type(each) is dict
        ]
        try:
            tensors = tensors_in(given)
            if without_grad:
                if not self._bare.is_bare(module) or self._bare.any_module(given):
                    return False
                return all(tensor.device.type == "cpu" for tensor in tensors) and not is_checkpointed()
            return not any(tensor.requires_grad for tensor in tensors)
        except Exception:  # noqa: BLE001 (what is nested, or a module's own, may be of any kind)
            self._recorder.broke(self._prepares_again)
            self._preparing.pop(id(args[0]), None)
            return False

    def _is_traced(self) -> bool:
        """Whether this call only writes down a graph, for `torch.export`, `torch.jit.trace` or `torch.fx`.

        It trains nothing, and a size that we read off a tensor would be fixed in the graph.
        """
        if self._is_compiling() or self._is_tracing():
            return True
        return bool(getattr(sys.modules.get(FX), FX_TRACES, False))


def _nothing() -> None:
    """What a reference to a module that is gone gives."""


def is_checkpointed() -> bool:
    """Whether the caller is inside a checkpointed region of the reentrant kind that is trained.

    There gradients are off; in the backward pass it is computed again with them. The region of an
    evaluation leads to no node of a graph.
    """
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    if checkpoint is None:
        return False
    code = checkpoint.CheckpointFunction.forward.__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and bool(frame.f_locals["ctx"].next_functions)


def _is_computed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call gets what a parameter has had a part in: it is no model's first."""
    return any(getattr(value, "grad_fn", None) is not None for value in (*args, *kwargs.values()))


def _through(route: Route, call: Any, *args: Any, **kwargs: Any) -> Any:
    return route(call, args, kwargs)
