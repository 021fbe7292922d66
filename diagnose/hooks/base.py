"""What a hook is, and the two ways in which hooks meet the user's script."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_ident
from types import CodeType, FunctionType, MethodType
from typing import Any

from diagnose.core.ledger import BACKWARD, COMPILE, FIRST_GAP, GAP_AFTER, GC
from diagnose.hooks._log import WIDTH
from diagnose.hooks._recorder import Recorder

HIDDEN_FILE = "<diagnose (importlib._bootstrap)>"
"""File name of every wrapper's code.

`warnings.warn(stacklevel=2)` skips frames whose file name holds both words, so a warning still points at
the user's line although our wrapper stands between.
"""

Before = Callable[[tuple[Any, ...], dict[str, Any]], int]
After = Callable[[tuple[Any, ...], Any], None]


class Hook:
    """Measures one thing while its context is open, and leaves no trace when it closes.

    Attributes:
        requires: The module whose import makes the hook installable. A script that never imports it is
            not measured in this respect, and misses nothing.
    """

    requires = "torch"

    def install(self, recorder: Recorder) -> AbstractContextManager[None]:
        """Opens the measurement.

        Args:
            recorder: Where spans and events go.

        Raises:
            AttributeError: If this torch lacks a name that the hook needs. The session then reports the
                hook as switched off, by that name, and the script goes on.
        """
        raise NotImplementedError


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `owner.name` by `wrap(original)` and puts back exactly what was there.

    If another library has replaced the name in the meantime, its replacement stays: it holds ours, which
    calls the original.

    Args:
        owner: A module or a class.
        name: The attribute to replace. On a class it may be inherited; then leaving deletes ours.
        wrap: Makes the replacement from the original.

    Raises:
        AttributeError: If `owner` has no such attribute.
    """
    own = vars(owner)
    inherited = name not in own
    original = getattr(owner, name) if inherited else own[name]
    replacement = wrap(original)
    setattr(owner, name, replacement)
    try:
        with nullcontext() if isinstance(owner, type) else _scripted_as(original, replacement):
            yield
    finally:
        if vars(owner).get(name) is replacement:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextmanager
def _scripted_as(original: Any, replacement: Any) -> Iterator[None]:
    """Lets TorchScript compile a replacement as it does the original: its builtins are told by identity."""
    builtins: Any = sys.modules.get("torch.jit._builtins")
    known = getattr(builtins, "_builtin_ops", [])
    entry = next(((replacement, op) for function, op in known if function is original), None)
    if entry is None:
        yield
        return
    known.append(entry)  # of which the table will be made, if there is none yet
    (builtins._builtin_table or {})[id(replacement)] = entry[1]
    try:
        yield
    finally:
        known.remove(entry)
        (builtins._builtin_table or {}).pop(id(replacement), None)


@contextmanager
def replaced_in(owners: Sequence[Any], name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces what several modules have under one name, by one and the same.

    A function is pickled by the name that it has in the module that defines it, so what stands there must
    be what others took from there.

    Raises:
        AttributeError: If an owner has no such attribute.
    """
    once = functools.cache(wrap)
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(replaced(owner, name, once))
        yield


class StandIn:
    """A method in place of another one, which it equals: libraries keep lists of torch's methods, and look
    up in them what a tensor of their own is asked for.

    Dynamo, too, puts the call into its graph: what is bound to a tensor has the method's name, and what is
    not is of the method's type.

    Args:
        function: What to call. Gets the name of what it stands for.
        original: What it stands for.
    """

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._function = function
        self._original = original
        self.__name__ = function.__name__ = getattr(original, "__name__", "")
        self.__qualname__ = function.__qualname__ = getattr(original, "__qualname__", "")
        self.__doc__ = original.__doc__

    @property  # type: ignore[misc]  # a class's is one that can be set
    def __class__(self) -> type:
        return self._original.__class__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self._function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or self._original == other

    def __hash__(self) -> int:
        return hash(self._original)


THEN = 64
"""Added to the slot that `before` returns, it asks for `after` to be called when the span has ended."""


def spanned(
    original: Callable[..., Any],
    recorder: Recorder,
    before: Before,
    after: After | None = None,
) -> Callable[..., Any]:
    """Wraps a callable so that its time is charged to a slot of the ledger.

    The wrapper is invisible where it matters: no line in a traceback (Python 3.11 and newer), no shift of a
    warning's line, nothing in a graph that Dynamo traces. An exception in `before` or `after` is
    reported in the run and never reaches the script.

    Args:
        original: What to call. Its arguments, result and exceptions pass through untouched.
        recorder: Charges the time.
        before: Gets `args` and `kwargs`; returns the slot to charge, or a negative number to leave the time
            to whatever surrounds the call. `slot + THEN` asks for `after`.
        after: Gets `args` and the result when it was asked for and nothing was raised.
    """
    from torch.compiler import is_dynamo_compiling

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        slot = -1
        if get_ident() == recorder.thread:
            try:
                slot = before(args, kwargs)
            except Exception:  # noqa: BLE001 (the one place where a hook meets the script)
                recorder.broke(before)
        if slot < 0:
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                unseen(error)
                raise
        then = slot >= THEN
        if then:
            slot -= THEN
        interrupted = recorder.current
        try:
            recorder.push(slot)
            result = original(*args, **kwargs)
        except BaseException as error:
            recorder.leave(slot, interrupted)
            unseen(error)
            raise
        recorder.leave(slot, interrupted)
        if then:
            assert after is not None
            try:
                after(args, result)
            except Exception:  # noqa: BLE001 (likewise)
                recorder.broke(after)
        return result

    return hidden(functools.wraps(original)(call) if isinstance(original, FunctionType) else call)


def charged(original: Callable[..., Any], recorder: Recorder, slot: int) -> Callable[..., Any]:
    """Wraps a callable as `spanned` does, and charges each call outside all spans to one slot.

    Cheaper than `spanned`, for calls that every step makes.
    """
    from torch.compiler import is_dynamo_compiling

    clock, log, gap = recorder.clock, recorder.log.append, GAP_AFTER[slot]

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        interrupted = recorder.current
        if interrupted < FIRST_GAP or get_ident() != recorder.thread:
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                unseen(error)
                raise
        try:
            recorder.current = slot
            log(clock() * WIDTH + slot)
            result = original(*args, **kwargs)
        except BaseException as error:
            recorder.leave(slot, interrupted)
            unseen(error)
            raise
        recorder.current = gap
        log(clock() * WIDTH + gap)
        return result

    recorder.log.kept_by(call)
    return hidden(functools.wraps(original)(call) if isinstance(original, FunctionType) else call)


IN_BACKWARD = frozenset((BACKWARD, COMPILE, GC))
"""Slots in which a backward pass waits for a thread of autograd's."""


def holding_up(recorder: Recorder) -> Callable[[], bool]:
    """Returns what tells whether the calling thread keeps the loop waiting: the training thread, or while
    that is in a backward pass, one in which autograd goes through what lies on a GPU."""
    import torch

    in_backward = torch._C._current_graph_task_id

    def holds_up() -> bool:
        return get_ident() == recorder.thread or (recorder.current in IN_BACKWARD and in_backward() >= 0)

    return holds_up


def timed(
    original: Callable[..., Any],
    recorder: Recorder,
    took: Callable[[int], None],
    begins: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """Wraps a callable, as invisibly as `spanned`, and tells `took` its nanoseconds; charges no slot."""
    clock = recorder.clock

    def call(*args: Any, **kwargs: Any) -> Any:
        if begins is not None:
            recorder.guarded(begins)
        begun = clock()
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            unseen(error)
            raise
        recorder.guarded(took, clock() - begun)
        return result

    return hidden(call)


def around(
    original: Callable[..., Any],
    before: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
    after: After | None = None,
) -> Callable[..., Any]:
    """Wraps a callable, as invisibly as `spanned`, so that others are called before it and after it.

    Charges no slot and guards nothing: for what a script calls now and then.

    Args:
        original: What to call.
        before: Gets `args` and `kwargs`.
        after: Gets `args` and the result if nothing was raised.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            unseen(error)
            raise
        if after is not None:
            after(args, result)
        return result

    return hidden(functools.wraps(original)(call) if isinstance(original, FunctionType) else call)


def unseen(error: BaseException) -> None:
    """Removes the wrapper's own frame from a traceback that passes through it.

    Called in an `except` clause that ends in a bare `raise`, which does not add the frame again (Python
    3.11 and newer; 3.10 does).
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a Python function the file name that warnings skip; returns it."""
    assert isinstance(function, FunctionType)
    code = _hidden_codes.get(function.__code__)
    if code is None:  # a wrapper that is made in every step, as of a closure, shares its code
        code = _hidden_codes[function.__code__] = function.__code__.replace(co_filename=HIDDEN_FILE)
        for skip_code in _skip_hidden:
            skip_code(code)
    function.__code__ = code
    return function


def always(slot: int) -> Before:
    """Returns a `before` that charges every call to `slot`."""
    return lambda args, kwargs: slot


def keep_out_of_dynamo() -> None:
    """Marks our frames as never to be compiled: the sampler's and the wrappers' run inside regions that
    Dynamo watches, and would count as compilations of the script.

    Raises:
        ImportError: If this torch has no way to mark them.
    """
    from torch._dynamo.eval_frame import skip_code

    package = __name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for value in list(vars(module).values()):
                functions = vars(value).values() if isinstance(value, type) else (value,)
                for function in functions:
                    function = getattr(function, "fget", function)  # a property
                    function = getattr(function, "__wrapped__", function)  # a context manager
                    if isinstance(function, FunctionType) and function.__module__.startswith(package):
                        _skip(function.__code__, skip_code)
    for code in _hidden_codes.values():
        skip_code(code)
    _skip_hidden.append(skip_code)


def _skip(code: CodeType, skip_code: Callable[[CodeType], None]) -> None:
    skip_code(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip(constant, skip_code)


_hidden_codes: dict[CodeType, CodeType] = {}
_skip_hidden: list[Callable[[CodeType], None]] = []
