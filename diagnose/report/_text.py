"""The report for a terminal or a file, in full."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from diagnose.core.profile import Profile
from diagnose.report._terminal import Terminal, display_width, padded
from diagnose.report.base import Block, Card, Facts, Paragraph, Row, Table, document

INDENT = "  "
GAP = "  "  # between two columns
SOURCE_INDENT = INDENT * 3
CODE_INDENT = INDENT * 3
CARD_INDENT = INDENT * 2
MAX_BAR_CELLS = 40
NARROWEST_NAME = 12  # columns of names are not cut below this
NARROWEST_WORDS = 24  # words with less room stand below their row


def to_text(profile: Profile, terminal: Terminal) -> str:
    """Prints the whole report.

    Returns:
        The lines, each with its newline. Only the user's own names and commands make a line longer than the
        terminal, where cutting them would make them useless.
    """
    lines = [terminal.paint(terminal.clean(f"run {profile.run.id}"), "bold")]
    for title, blocks in document(profile):
        lines += ["", terminal.paint(title, "bold")] if title else []
        for number, block in enumerate(blocks):
            lines += [""] if number and isinstance(block, Card) else []
            lines += block_lines(block, terminal)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def block_lines(block: Block, terminal: Terminal) -> list[str]:
    """Prints one block of any kind; a bar of phases stands in the ledger's rows already."""
    if isinstance(block, Paragraph):
        return _paragraph(block, terminal)
    if isinstance(block, Facts):
        return _facts(block, terminal)
    if isinstance(block, Table):
        return _table(block, terminal)
    if isinstance(block, Card):
        return _card(block, terminal)
    return []


def wrapped(text: str, terminal: Terminal, indent: str = INDENT, first: str = "") -> list[str]:
    """Fills lines with foreign text, of which no word is cut; `first` indents the first one otherwise."""
    return textwrap.wrap(
        terminal.clean(text),
        terminal.width,
        initial_indent=first or indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paragraph(paragraph: Paragraph, terminal: Terminal) -> list[str]:
    lines = wrapped(paragraph.text, terminal)
    if paragraph.alarm:
        lines = [INDENT + terminal.paint(line[len(INDENT) :], "alarm") for line in lines]
    return [*lines, *_code_lines(paragraph.code, terminal)]


def _code_lines(code: str, terminal: Terminal) -> list[str]:
    return [CODE_INDENT + terminal.paint(terminal.clean(line), "place") for line in code.splitlines()]


def _card(card: Card, terminal: Terminal) -> list[str]:
    """The title stands out; below it, further in, what belongs to it."""
    title = [INDENT + terminal.paint(line[len(INDENT) :], "bold") for line in wrapped(card.title, terminal)]
    lines = [*title, *wrapped("  ".join(card.tags), terminal, CARD_INDENT)]
    labels = max((len(fact.label) for fact in card.facts), default=0) + len(GAP)
    for fact in card.facts:
        text = f"{fact.value} {fact.detail}".rstrip()
        indent = CARD_INDENT + " " * labels
        lines += wrapped(text, terminal, indent, f"{CARD_INDENT}{fact.label:<{labels}}")
    for point in card.points:
        lines += wrapped(point, terminal, CARD_INDENT + "  ", CARD_INDENT + "- ")
    lines += wrapped(f"To do: {card.advice}", terminal, CARD_INDENT) if card.advice else []
    lines += _code_lines(card.code, terminal)
    lines += [terminal.paint(line, "dim") for line in wrapped(card.caveat, terminal, CARD_INDENT)]
    return lines


def _facts(facts: Facts, terminal: Terminal) -> list[str]:
    """One fact per line: label, value, detail, in columns."""
    labels = max((len(fact.label) for fact in facts.items), default=0)
    values = max((display_width(fact.value) for fact in facts.items if fact.detail), default=0)
    lines = []
    for fact in facts.items:
        value = padded(terminal.clean(fact.value), values if fact.detail else 0)
        value = terminal.paint(value, "bold") if facts.headline else value
        detail = GAP + terminal.clean(fact.detail) if fact.detail else ""
        lines.append(f"{INDENT}{fact.label:<{labels}}{GAP}{value}{detail}")
    return lines


def _table(table: Table, terminal: Terminal) -> list[str]:
    """Prints rows in columns. Where these are too wide, words in the last one are wrapped, or stand below
    their row, before any name is cut."""
    cells = [[terminal.clean(cell) for cell in row.cells] for row in table.rows]
    widths = [
        max([len(column.title), *(display_width(row[index]) for row in cells)])
        for index, column in enumerate(table.columns)
    ]
    words = _ends_in_words(widths, table, terminal)
    if words:
        del widths[-1]
        indent = len(INDENT) + sum(widths) + len(GAP) * len(widths)
        beside = terminal.width - indent >= NARROWEST_WORDS
    _narrow(widths, table, terminal)
    header = [
        padded(column.title, width, right=column.number)
        for column, width in zip(table.columns, widths, strict=not words)
    ]
    header += [table.columns[-1].title] if words and beside else []
    lines = [*wrapped(table.caption, terminal), terminal.paint(INDENT + GAP.join(header), "dim")]
    for row, texts in zip(table.rows, cells, strict=True):
        fitted = [
            padded(terminal.shortened(text, width), width, right=column.number)
            for column, width, text in zip(table.columns, widths, texts, strict=not words)
        ]
        line = INDENT + GAP.join(fitted)
        if words and beside:
            lines += wrapped(texts[-1], terminal, " " * indent, line + GAP) or [line]
        elif words:
            lines += [line.rstrip(), *wrapped(texts[-1], terminal, SOURCE_INDENT)]
        else:
            lines.append(line.rstrip() + _bar(row, widths, terminal))
        if row.source:
            room = terminal.width - len(SOURCE_INDENT)
            source = terminal.shortened(terminal.clean(row.source), room)
            lines.append(SOURCE_INDENT + terminal.paint(source, "dim"))
    return lines


def _ends_in_words(widths: Sequence[int], table: Table, terminal: Terminal) -> bool:
    """Returns whether the table is too wide, and its last column is of words, which can be wrapped."""
    last = table.columns[-1]
    is_too_wide = len(INDENT) + sum(widths) + len(GAP) * (len(widths) - 1) > terminal.width
    return is_too_wide and not (last.code or last.number)


def _narrow(widths: list[int], table: Table, terminal: Terminal) -> None:
    """Takes from the columns of names, the last one first, what the table is too wide."""
    excess = len(INDENT) + sum(widths) + len(GAP) * (len(widths) - 1) - terminal.width
    for index in reversed(range(len(widths))):
        if table.columns[index].code and excess > 0:
            cut = min(excess, max(0, widths[index] - NARROWEST_NAME))
            widths[index] -= cut
            excess -= cut


def _bar(row: Row, widths: Sequence[int], terminal: Terminal) -> str:
    """Draws the row's share in what the columns leave of the line."""
    if row.share is None:
        return ""
    used = len(INDENT) + sum(widths) + len(GAP) * len(widths)
    bar = terminal.bar(row.share, max(0, min(MAX_BAR_CELLS, terminal.width - used)))
    return GAP + terminal.paint(bar, "bar") if bar else ""
