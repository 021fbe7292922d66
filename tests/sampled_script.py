"""A script and the lines in it that hooks were entered from, with the roles of its other lines."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import dedent

from diagnose.core.ledger import SLOT_OF
from diagnose.core.phases import Phase
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources

FILE = "/home/u/train.py"
AFTER_DATA_WAIT = SLOT_OF["gap_after_data_wait"]
AFTER_FORWARD = SLOT_OF["gap_after_forward"]
AFTER_BACKWARD = SLOT_OF["gap_after_backward"]
AFTER_OPTIMIZER = SLOT_OF["gap_after_optimizer"]
PASSES = [("loss.backward", "backward"), ("optimizer.step", "optimizer")]


class Script:
    """A script and the lines in it from which hooks were entered.

    Args:
        source: Its text. Lines are named by a part of them that no other line has.
        sites: The part of a line, and the kind of what it calls.
        inside: Stacks that were sampled inside a model call or a backward: the slot, then parts of lines,
            innermost first.
    """

    def __init__(
        self, source: str, sites: Iterable[tuple[str, str]], inside: Iterable[tuple[str, ...]] = ()
    ) -> None:
        self.lines = dedent(source).splitlines()
        self.roles = Roles(
            [(kind, FILE, self.line(part), "f", 1) for part, kind in sites],
            Sources({FILE: dedent(source)}),
            [(0, SLOT_OF[slot], [("", 0, ""), *self.stack(*parts)], 1) for slot, *parts in inside],
        )

    def line(self, part: str) -> int:
        (number,) = (n for n, text in enumerate(self.lines, 1) if part in text)
        return number

    def stack(self, *parts: str) -> list[tuple[str, int, str]]:
        return [(FILE, self.line(part), self.function(self.line(part))) for part in parts]

    def function(self, number: int) -> str:
        """The name of the function that a line is in."""
        depth = indent(self.lines[number - 1])
        around = (text for text in reversed(self.lines[: number - 1]) if indent(text) < depth)
        return next((text.split()[1].split("(")[0] for text in around if "def " in text), "<module>")

    def phase(self, *parts: str, slot: int) -> Phase:
        return self.roles.phase(self.stack(*parts), slot)


def indent(text: str) -> int:
    return len(text) - len(text.lstrip()) if text else 99
