"""Tells the user's frames from those of libraries, and turns sampled instructions into lines."""

from __future__ import annotations

import codecs
import inspect
import os
import sys
import sysconfig
from functools import partial
from types import CodeType, FrameType
from typing import Any

import diagnose
from diagnose.hooks._skid import entry, operator_before

MAX_FRAMES = 8
"""User frames kept of one stack: from the line that spends the time out to the loop that called for it."""

INTERNAL, LIBRARY, USER, OUTERMOST = 0, 1, 2, 3
"""Whose code a frame runs: Python's, torch's or ours; another installed package's, or that of torch's
profiler, which trains nothing; the user's. That of the last is ours, and what called it is left out: see
`end_stacks_at`."""

LOOKS_AT_LOCALS = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe"})
"""A function that uses one of these may hold the dictionary of its own names."""

_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PYTHONS = tuple(
    os.path.join(root, "")
    for root in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        os.path.dirname(os.path.realpath(os.__file__)),
    }
)
_OURS = tuple({os.path.join(os.path.dirname(at(diagnose.__file__)), "") for at in (str, os.path.realpath)})
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
_PROFILER = f"{_TORCH}profiler{os.sep}"
# A notebook's cells, `python -c` and a script on standard input have such names.
_USER_NAMES = ("<stdin>", "<string>", "<ipython-input", "<python-input")

_DECODES = codecs.BufferedIncrementalDecoder.decode.__code__

_codes: dict[int, CodeType] = {}
_owners: dict[int, int] = {}
_entries: dict[int, int] = {}


def owner(code: CodeType) -> int:
    """Returns whose code it is: `USER`, `LIBRARY` or `INTERNAL`."""
    known = _owners.get(id(code))
    if known is None:
        known = file_owner(code.co_filename)
        # The owner last: a sample taken in between, or by another thread, finds all three or none.
        _codes[id(code)] = code  # kept alive, so that its identity stays its own
        _entries[id(code)] = entry(code)
        _owners[id(code)] = known
    return known


def file_owner(file: str) -> int:
    """Returns whose code is in a file: see `owner`."""
    if file.startswith("<"):
        return USER if file.startswith(_USER_NAMES) else INTERNAL
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and file == main:
        return USER
    path = os.path.abspath(file)
    if path.startswith(_OURS):  # first, as it lies where all packages do, once it is installed
        return INTERNAL
    if any(part in path for part in _LIBRARY_PARTS):
        return INTERNAL if _TORCH in path and _PROFILER not in path else LIBRARY
    return INTERNAL if path.startswith(_PYTHONS) else USER


def end_stacks_at(code: CodeType) -> None:
    """Makes stacks end at a function with which a process begins: in a forked one, the frames further out
    are copies of what the parent did when it forked."""
    owner(code)
    _owners[id(code)] = OUTERMOST


def user_frame(frame: FrameType | None) -> tuple[int, int] | None:
    """Returns `(id(code), instruction)` of the innermost user frame at or outside `frame`."""
    while frame is not None:
        if owner(frame.f_code) == USER:
            return id(frame.f_code), frame.f_lasti
        frame = frame.f_back
    return None


def place_of(function: Any) -> tuple[str, int]:
    """Returns where a function, a method or what can be called like one is written, absolute file and line;
    empty and 0 where the script did not write it."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    if not isinstance(code, CodeType) or owner(code) != USER:
        return "", 0
    file = code.co_filename
    return file if file.startswith("<") else os.path.abspath(file), code.co_firstlineno


def user_stack(slot: int, frame: FrameType | None) -> tuple[int, ...]:
    """Returns the slot, then `id(code)` and instruction of some frames, innermost first.

    The first pair is the innermost frame of an installed package inside the user's code, or zeros: under a
    trainer the user's only line is `trainer.train()`, and the package's says more. Then come the user's
    frames. A function that has just begun is left out, and the instruction of its caller is complemented.
    """
    key = [slot, 0, 0]
    known = _owners
    called = False
    if frame is not None and frame.f_back is not None:
        owner(frame.f_code)
        # A text file's decoder begins when the line has come: the time is that of reading it, not before.
        if frame.f_lasti == _entries[id(frame.f_code)] and frame.f_code is not _DECODES:
            called, frame = True, frame.f_back
    while frame is not None:
        code = frame.f_code
        whose = known.get(id(code))
        if whose is None:
            whose = owner(code)
        if whose == USER:
            key += (id(code), ~frame.f_lasti if called else frame.f_lasti)
            if len(key) > 2 * MAX_FRAMES + 2:
                break
        elif whose == LIBRARY and key[1] == 0 and len(key) == 3:
            key[1], key[2] = id(code), frame.f_lasti
        elif whose == OUTERMOST:
            break
        called = False
        frame = frame.f_back
    return tuple(key)


def resolve(code_id: int, instruction: int) -> tuple[str, int, str]:
    """Turns a sampled instruction into absolute file, line and function.

    Args:
        code_id: Identity of a code object that `user_stack` returned; 0 stands for none.
        instruction: Byte offset into its code. A negative one is the complement of where a call stands that
            has taken no time: the operator before it has.
    """
    if not code_id:
        return "", 0, ""
    code = _codes[code_id]
    if instruction < 0:
        instruction = operator_before(code, ~instruction)
    line = code.co_firstlineno
    for start, _, number in code.co_lines():
        if start > instruction:
            break
        line = number or line  # the way back of a loop may have none: it is that of what came before
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
    file = code.co_filename
    return file if file.startswith("<") else os.path.abspath(file), line, name


def value_of(frame: FrameType, name: str) -> Any:
    """Returns what a name stands for in a frame; `None` for one that is not bound, or not looked at.

    Before Python 3.13 a function's `f_locals` is one dictionary, that keeps what it held, and that the
    function's own `locals()` returns: it is emptied again, and not looked at where that may be in use.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or name not in (
        *code.co_varnames,
        *code.co_cellvars,
        *code.co_freevars,
    ):
        return frame.f_globals.get(name)
    if sys.version_info >= (3, 13):
        return frame.f_locals.get(name)
    if sys.gettrace() is not None or not LOOKS_AT_LOCALS.isdisjoint(code.co_names):
        return None
    held = frame.f_locals
    value = held.get(name)
    held.clear()
    return value
