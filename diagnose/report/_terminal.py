"""What the terminal at the other end can show, and text fitted to it."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from diagnose.report._wording import printable

ASCII_FOR = str.maketrans({"±": "+-", "…": "..."})
EIGHTHS = " ▏▎▍▌▋▊▉"
STYLES = {"bold": "1", "dim": "2", "alarm": "1;31", "bar": "36", "place": "1"}
NARROWEST = 44  # the next command to paste, which is never cut, fits into this


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """How to print: how many columns, whether in colour, whether beyond ASCII.

    Attributes:
        width: Columns to fill at most.
        color: Whether to write ANSI colours.
        unicode: Whether to write anything but ASCII.
    """

    width: int = 80
    color: bool = False
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO, *, widest: int = 80) -> Terminal:
        """Describes the terminal, file or pipe behind `stream`.

        Args:
            stream: Where the text will be written.
            widest: Columns to use at most, and where there is no terminal to ask.
        """
        is_terminal = stream.isatty()
        columns = shutil.get_terminal_size((widest, 24)).columns if is_terminal else widest
        return cls(
            width=max(NARROWEST, min(widest, columns)),
            color=wants_color(is_terminal, os.environ),
            unicode=(getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8",
        )

    def paint(self, text: str, style: str) -> str:
        """Wraps `text` in a style of `STYLES`, where colour is wanted."""
        return f"\033[{STYLES[style]}m{text}\033[0m" if self.color and text else text

    def bar(self, share: float, cells: int) -> str:
        """Draws `share` of a bar that would be `cells` columns long."""
        length = max(0.0, min(1.0, share)) * cells
        if not self.unicode:
            return "#" * round(length)
        whole, eighths = divmod(round(8 * length), 8)
        return "█" * whole + EIGHTHS[eighths].strip()

    def encoded(self, text: str) -> str:
        """Returns `text` with what the terminal cannot show written in ASCII, as escapes if need be."""
        if self.unicode:
            return text
        return text.translate(ASCII_FOR).encode("ascii", "backslashreplace").decode("ascii")

    def clean(self, text: str) -> str:
        """Returns foreign text as the terminal can show it."""
        return self.encoded(printable(text))

    def shortened(self, text: str, cells: int) -> str:
        """Cuts the middle out of `text` so that it takes at most `cells` columns."""
        if display_width(text) <= cells:
            return text
        gap = "…" if self.unicode else "..."
        if cells <= len(gap):
            return gap[:cells]
        room = cells - len(gap)
        # The end of a path or name says more than its beginning: it gets the odd column and a third more.
        tail = room - room // 3
        return _leading(text, room - tail) + gap + _leading(text[::-1], tail)[::-1]


PLAIN = Terminal()
"""For text that goes elsewhere: 80 columns, no colour."""


def wants_color(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Decides on colour in the order that Python itself uses: NO_COLOR, FORCE_COLOR, TERM, terminal."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return is_terminal and environ.get("TERM") != "dumb"


def display_width(text: str) -> int:
    """Returns the columns that `text` takes: two for a wide East Asian character, none for an accent."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def padded(text: str, cells: int, *, right: bool = False) -> str:
    """Fills `text` with blanks up to `cells` columns."""
    blanks = " " * (cells - display_width(text))
    return blanks + text if right else text + blanks


def _leading(text: str, cells: int) -> str:
    """Returns as much of the beginning of `text` as fits `cells` columns."""
    while display_width(text) > cells:
        text = text[: min(len(text) - 1, cells)]
    return text
