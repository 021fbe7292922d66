"""What batches are made from, looked at closely enough to notice when the script changes it."""

from __future__ import annotations

import dis
import functools
import logging
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakMethod, ref

import torch

from diagnose.actions._loader_contents import (
    MAX_BYTES,
    Room,
    contents_of_array,
    contents_of_bytes,
    contents_of_items,
)
from diagnose.actions._loader_objects import (
    BUFFERS,
    arrays_in,
    has_attributes,
    is_index,
    is_opaque,
    is_users,
    is_users_module,
    slot_names,
)
from diagnose.hooks._frames import USER, owner
from diagnose.hooks._signals import from_signal_handler

MAX_DEPTH = 10
MAX_PARTS = 2000
"""Objects are looked at so deep, and so many of them: transforms are nested, tables are long."""

MAX_ITEMS = 32
"""The items of a longer container are samples, not settings: they are no parts, but summed up."""

MAX_SLOTS = 100
"""So many names are looked at between two batches, in some microseconds."""

EAGER_LOOKS = 8
LOOK_SHARE = 0.01
"""What changes in each step of the loop is seen in so many looks; later ones take this part of the time."""

Signature = dict[tuple[str, ...], Any]
"""What was seen of an object's parts, by the path of attributes that leads there."""

Part = tuple[str, Any, "Mapping[str, Any] | None"]
"""A part's name, the part, and the mapping that has it by this name."""

NOTHING: tuple[Part, ...] = ()

GONE = object()


class Stream(int):
    """Stands for the state of a `torch.Generator`."""


class Look:
    """One look at objects and what they are made of.

    Seen are attributes, elements of containers, bytes of NumPy's arrays, of ctypes' objects and of pandas'
    tables, version counters of tensors, the state of random number generators, and what functions close
    over. Of the script's own code also the global names that functions read, and the attributes of classes.
    Of long tables a sample is seen, and of memory-mapped files and what is written to a tensor's memory
    without its knowledge nothing.

    Args:
        whole: The object that has the empty path.
        others: Objects by the name that their paths begin with.
        closely: Whether elements of long containers and arrays are seen.
        most_bytes: Of arrays that are seen.

    Attributes:
        seen: The state of each part.
        objects: The parts.
        slots: Names that lead to a part, and the mappings that have them: outermost first.
        unseen: The first part that may change without being seen to, looked at closely: a sampled table, or
            a compiled object that shows nothing. Empty if there is none.
    """

    def __init__(
        self, whole: Any, *, closely: bool = True, most_bytes: int = MAX_BYTES, **others: Any
    ) -> None:
        self.seen: Signature = {}
        self.slots: list[tuple[Mapping[str, Any], str, Any]] = []
        self.unseen = ""
        room = Room(most_bytes) if closely else None
        known: dict[int, tuple[Any, Any]] = {}  # with the object: one that is alive shares its id with none
        waiting: deque[tuple[tuple[str, ...], Any]] = deque([((), whole)])
        waiting.extend(((name,), other) for name, other in others.items())
        while waiting and len(self.seen) < MAX_PARTS:
            path, value = waiting.popleft()
            if id(value) in known:
                self.seen[path] = known[id(value)][1]
                continue
            state, parts = _seen_part(value, room)
            if room is not None and room.left_out and not self.unseen:
                self.unseen = f"{'.'.join(path) or 'the dataset'} ({type(value).__qualname__})"
            known[id(value)] = value, state
            self.seen[path] = state
            for name, part, holder in parts if len(path) < MAX_DEPTH else NOTHING:
                waiting.append(((*path, name), part))
                if holder is not None and len(self.slots) < MAX_SLOTS:
                    self.slots.append((holder, name, part))
        self.objects = [value for value, _ in known.values()]


def signature(whole: Any, **others: Any) -> Signature:
    """Returns what tells whether objects, or what they are made of, have changed since: see `Look`."""
    return Look(whole, **others).seen


def weakly(value: Any, then: Callable[[], None] | None = None) -> Callable[[], Any]:
    """Returns what returns an object while others hold it; always, if it allows no weak references.

    Args:
        then: A method that is called when it goes, unless its own object has gone before; in this process
            only, and in none that is forked from it.
    """
    method, process = WeakMethod(then) if then else None, os.getpid()

    def goes(_: Any) -> None:
        call = method() if method is not None and os.getpid() == process else None
        if call is not None:
            call()

    try:
        return WeakMethod(value) if isinstance(value, MethodType) else ref(value, goes)
    except TypeError:
        return lambda: value


class Watch:
    """Tells whether the script has changed what batches are made from. The objects are not kept alive.

    Args:
        whole: See `Look`.
        draws: Whether the states of generators of torch's are looked at.
        most_bytes: See `Look`.
        others: See `Look`.

    Attributes:
        unseen: See `Look`.
    """

    def __init__(
        self, whole: Any, *, draws: bool = True, most_bytes: int = MAX_BYTES, **others: Any
    ) -> None:
        self._whole, self._draws, self._most_bytes = weakly(whole), draws, most_bytes
        self._others = {name: weakly(other) for name, other in others.items()}
        self.renew()

    def renew(self, **others: Any) -> None:
        """From now on, changes are those since this moment.

        Args:
            others: What has the names of these others now.
        """
        self._others.update({name: weakly(other) for name, other in others.items()})
        look = self._look()
        self._seen, self._slots = self._of_interest(look), look.slots
        holders = {id(holder): holder for holder, _, _ in look.slots if "__builtins__" not in holder}
        self._sizes = [(holder, len(holder)) for holder in holders.values()]
        self._asked = 0

    def has_changed(self, **others: Any) -> bool:
        """Looks at everything: milliseconds where there are long tables.

        Args:
            others: What has the names of these others now: another object is a change, too.
        """
        if not all(_is(self._others[name](), other) for name, other in others.items()):
            return True
        return self._of_interest(self._look()) != self._seen

    def has_changed_now(self) -> bool:
        """Looks as far as there is time between two batches: at names always, rarely at everything."""
        if any(holder.get(name, GONE) is not part for holder, name, part in self._slots):
            return True
        if any(len(holder) != size for holder, size in self._sizes):
            return True
        self._asked += 1
        if self._asked > EAGER_LOOKS and (time.perf_counter() - self._at) * LOOK_SHARE < self._took_s:
            return False
        return self.has_changed()

    def _look(self) -> Look:
        begun = time.perf_counter()
        others = {name: other() for name, other in self._others.items()}
        look = Look(self._whole(), most_bytes=self._most_bytes, **others)
        self.unseen = look.unseen
        self._at = time.perf_counter()
        self._took_s = self._at - begun
        return look

    def _of_interest(self, look: Look) -> Signature:
        return look.seen if self._draws else without_streams(look.seen)


def _is(one: Any, other: Any) -> bool:
    """Whether two are one object. A method is made anew each time that it is named."""
    return one is other or (isinstance(one, MethodType) and bool(one == other))


def without_streams(seen: Signature) -> Signature:
    """Returns a signature without the states of generators of torch's."""
    return {path: state for path, state in seen.items() if not isinstance(state, Stream)}


def _seen_part(value: Any, room: Room | None) -> tuple[Any, Iterable[Part]]:
    try:
        state, parts = _part(value, room)
        return state, tuple(parts)
    except Exception as error:
        if from_signal_handler(error.__traceback__):
            raise  # the script's own
        if room is not None:
            room.left_out = True
        return id(value), NOTHING  # an object that does not let itself be looked at


def _part(value: Any, room: Room | None) -> tuple[Any, Iterator[Part] | tuple[Part, ...]]:
    """Returns what is to be compared of one object, and the objects it is made of."""
    if isinstance(value, float):
        return value.hex(), NOTHING  # as NaN is not equal to itself, and 0.0 is to -0.0
    if value is None or isinstance(value, bool | int | complex | str | bytes):
        return (type(value), value), NOTHING
    if isinstance(value, torch.Tensor):
        return (id(value), value._version), NOTHING
    if isinstance(value, torch.Generator):
        return Stream(hash(value.get_state().numpy().tobytes())), NOTHING
    if isinstance(value, random.Random):
        return hash(value.getstate()), NOTHING
    if isinstance(value, ModuleType | BuiltinFunctionType | logging.Logger):
        return id(value), NOTHING
    if isinstance(value, type):
        return id(value), _of_class(value)
    numpy_state = _numpy_state(value, room)
    if numpy_state is not None:
        return numpy_state, NOTHING
    if isinstance(value, BUFFERS):
        return (id(value), contents_of_bytes(value, room) if room else 0), NOTHING
    if is_index(value):
        return id(value), NOTHING
    arrays = arrays_in(value)
    if arrays is not None:
        return _of_arrays(value, arrays, room)
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return _of_container(value, room)
    if isinstance(value, FunctionType):
        return id(value), _of_function(value)
    if isinstance(value, functools.partial):
        parts = ("func", value.func, None), ("args", value.args, None), ("keywords", value.keywords, None)
        return id(value), parts
    if isinstance(value, MethodType):
        return id(value.__func__), (("self", value.__self__, None), ("func", value.__func__, None))
    return _of_instance(value, room)


def _of_container(value: Any, room: Room | None) -> tuple[Any, Iterator[Part] | tuple[Part, ...]]:
    state = id(value), len(value)
    if len(value) > MAX_ITEMS:
        return (*state, contents_of_items(value, room)) if room is not None else state, NOTHING
    if isinstance(value, dict):
        items = list(dict.items(value))
        return state, ((str(key), part, value if type(key) is str else None) for key, part in items)
    return state, ((str(i), part, None) for i, part in enumerate(value))


def _of_arrays(value: Any, arrays: list[Any], room: Room | None) -> tuple[Any, Iterator[Part]]:
    """What is compiled in pandas' tables; arrays of its own, and of others, are its parts."""
    states = [_numpy_state(each, room) for each in arrays]
    others = ((str(i), arrays[i], None) for i, state in enumerate(states) if state is None)
    return (id(value), *map(id, getattr(value, "axes", ())), *states), others


def _of_instance(value: Any, room: Room | None) -> tuple[Any, Iterator[Part]]:
    attributes = vars(value) if has_attributes(value) else {}
    if room is not None and is_opaque(value):
        room.left_out = True

    def parts() -> Iterator[Part]:
        # A copy: looking at a part must not meet what the script's own threads add meanwhile.
        for name, part in list(attributes.items()):
            yield name, part, attributes
        cls = type(value)
        if is_users(cls):
            yield f"class {cls.__name__}", cls, None
        for name in slot_names(cls) or ():
            yield name, getattr(value, name, None), None

    return (id(value), len(attributes)), parts()


def _of_class(cls: type) -> Iterator[Part]:
    """Yields what the script's own classes have in common for all their instances."""
    if not is_users(cls):
        return
    attributes = vars(cls)
    for name, part in list(attributes.items()):
        if isinstance(part, staticmethod | classmethod):
            yield name, part.__func__, None
        elif isinstance(part, property):
            yield name, part.fget, None
        elif isinstance(part, FunctionType) or name[:2] != "__":
            yield name, part, attributes
    for base in cls.__bases__:
        yield f"class {base.__name__}", base, None


def _of_function(function: FunctionType) -> Iterator[Part]:
    for i, cell in enumerate(function.__closure__ or ()):
        if _filled(cell):
            yield str(i), cell.cell_contents, None
    if owner(function.__code__) != USER:
        return
    for name, part in vars(function).items():
        yield name, part, vars(function)
    yield "defaults", function.__defaults__, None
    yield "kwdefaults", function.__kwdefaults__, None
    names = function.__globals__
    for name, attribute in _reads(function.__code__):
        part = names.get(name, GONE)
        if isinstance(part, ModuleType):
            inside = vars(part)
            if attribute in inside and is_users_module(part):
                yield f"{name}.{attribute}", inside[attribute], None
        elif part is not GONE:
            yield name, part, names


@functools.lru_cache(maxsize=10_000)
def _reads(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Returns the global names that code reads, each with the attribute of it that is read, if any."""
    found: dict[tuple[str, str], None] = {}
    instructions = list(dis.get_instructions(code))
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads_attribute = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            found[instruction.argval, following.argval if following and reads_attribute else ""] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found.update(dict.fromkeys(_reads(inner)))
    return tuple(found)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that its function has not assigned yet
        return False


def _numpy_state(value: Any, room: Room | None) -> Any:
    """Returns the comparable state of numpy's arrays and generators, `None` of what is neither."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not type(value).__module__.startswith("numpy"):
        return None
    if isinstance(value, numpy.ndarray):
        return id(value), value.shape, contents_of_array(value, room) if room else 0
    generator = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    return str(generator.state) if generator is not None else None
