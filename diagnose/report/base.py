"""What a section of the report is made of, whatever it is printed as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from diagnose.core.phases import Phase
from diagnose.core.plugins import discover
from diagnose.core.profile import Profile
from diagnose.report._charts import Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """Running text. `code` is a snippet to paste, shown apart; `alarm` marks what must not be missed."""

    text: str
    code: str = ""
    alarm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One labelled value: `step time`, `40.1 ms`, `median`.

    `code` says that the value is from the user's program, shown letter for letter.
    """

    label: str
    value: str
    detail: str = ""
    code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Labelled values side by side. `headline` are the figures that the reader came for."""

    items: tuple[Fact, ...]
    headline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBar:
    """One bar that is the whole step, divided into its phases. Only HTML draws it.

    Attributes:
        shares: Parts of the step, 0 to 1, in the order they are drawn.
        title: What the bar shows, for readers who cannot see it.
    """

    shares: Mapping[Phase, float]
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its header.
        number: Whether it holds figures, aligned on the right.
        code: Whether it holds names from the user's program, shown letter for letter.
    """

    title: str
    number: bool = False
    code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table.

    Attributes:
        cells: One text per column.
        phase: The phase that the row is about; HTML shows its colour.
        share: Length of the bar drawn at the row's end, 0 to 1.
        source: The line of source code that the row is about, shown below it.
    """

    cells: tuple[str, ...]
    phase: Phase | None = None
    share: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table, with what it shows in one sentence.

    Raises:
        ValueError: If a row has more or fewer cells than there are columns.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{len(row.cells)} cells for {len(self.columns)} columns: {row.cells}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One thing found: what, where, how much, why it is believed, and what to do.

    Attributes:
        title: What was found, in a sentence.
        tags: Names it goes by and places it is at, shown letter for letter.
        facts: Its size.
        points: What proves it, one sentence each.
        advice: What to do.
        code: Lines to paste.
        caveat: What the size takes for granted.
    """

    title: str
    tags: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    points: tuple[str, ...] = ()
    advice: str = ""
    code: str = ""
    caveat: str = ""


Block = Paragraph | Facts | PhaseBar | Table | Card | Chart


class Section(ABC):
    """One part of the report. Written once, printed as text, markdown and HTML.

    Attributes:
        order: Place in the report; smaller is earlier.
        title: Heading; empty for the section that opens the report.
    """

    order: ClassVar[int]
    title: ClassVar[str]

    @abstractmethod
    def blocks(self, profile: Profile) -> Sequence[Block]:
        """Returns what the section says of the run; nothing leaves the section out."""


def sections() -> list[Section]:
    """Returns every section of this folder in the order of the report."""
    from diagnose import report

    found = discover(report, Section)  # type: ignore[type-abstract]
    return sorted(found.values(), key=lambda section: section.order)


def document(profile: Profile) -> list[tuple[str, Sequence[Block]]]:
    """Returns the report's headings, each with its blocks."""
    contents = [(section.title, section.blocks(profile)) for section in sections()]
    return [(title, blocks) for title, blocks in contents if blocks]
