"""Finds what was running when a signal came, where Python ran the handler only later.

CPython looks for signals when a function begins, after a call into C and when a loop goes back, but not
after an operator, nor when a function of Python's returns. So what `x = table[order]` took is seen where
the next function begins, and so is what a function did after its last call. A function that has just begun
has taken no time itself: it was what its caller did before the call. But if the caller called a function of
C's that works before it calls Python, it was that: `open` asks for the file's codec last.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from types import CodeType

LOOKS = ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""How the names of instructions begin after which CPython looks for signals, besides calls into C."""

OPERATORS = ("BINARY_", "INPLACE_", "UNARY_", "COMPARE_OP", "CONTAINS_OP", "STORE_SUBSCR", "DELETE_SUBSCR")
"""How the names of instructions begin that may run long in C."""

THROUGH_C = frozenset(
    ("open", "sorted", "list", "tuple", "set", "dict", "frozenset", "sum", "min", "max", "any", "all")
)
"""Built-in functions that work before or between what they call of Python's."""

VIEW = ("BUILD_SLICE", "LOAD_CONST", "LOAD_SMALL_INT")
"""What makes an index: a slice or a constant picks a view of a tensor, or little of a list."""


def entry(code: CodeType) -> int:
    """Returns the offset at which a function of this code stands when it has just begun."""
    resume = dis.opmap.get("RESUME")
    if resume is None:  # before Python 3.11
        return -1
    opcodes = code.co_code[::2]
    return 2 * opcodes.index(resume) if resume in opcodes else -1


def operator_before(code: CodeType, call: int) -> int:
    """Returns the offset of what ran last before the call: an operator, another call, or the call itself.

    Of several operators the first is a guess: tables are indexed before what is made of them. Another call
    ran as long as it did after its own last look for signals: nothing, if it was one into C.

    Args:
        code: The caller's.
        call: Where the caller stands: at the call, or in the cache behind it.
    """
    found = last = call
    previous = ""
    *before, calling = (each for each in dis.get_instructions(code) if each.offset <= call)
    if _callee(before, calling) in THROUGH_C:
        return call
    for instruction in before:
        name = instruction.opname
        if name.startswith(LOOKS):
            found = last = call
        elif name.startswith("CALL"):
            found = last = instruction.offset
        elif found == last and name.startswith(OPERATORS) and name != "BINARY_SLICE":
            subscript = name == "BINARY_SUBSCR" or instruction.argrepr == "[]"  # the latter in Python 3.14
            if not (subscript and previous in VIEW):
                found = instruction.offset
        previous = name
    return found


def _callee(before: Sequence[dis.Instruction], call: dis.Instruction) -> object:
    """Returns the name last loaded where the text of a call begins: `read` of `open(path).read()`."""
    start = _start(call)
    loads = (each for each in reversed(before) if each.opname.startswith("LOAD_") and _start(each) == start)
    return next((each.argval for each in loads), None) if start else None


def _start(instruction: dis.Instruction) -> tuple[int, int] | None:
    """Returns line and column at which the text of an instruction begins; none before Python 3.11."""
    positions = getattr(instruction, "positions", None)
    return (positions.lineno, positions.col_offset) if positions and positions.lineno else None
