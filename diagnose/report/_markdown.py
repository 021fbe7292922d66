"""The report for a pull request: GitHub's markdown, in which every foreign name is only text."""

from __future__ import annotations

import re
import textwrap

from diagnose.core.profile import Profile
from diagnose.report._terminal import PLAIN
from diagnose.report._wording import printable, spans
from diagnose.report.base import Block, Card, Column, Fact, Facts, Paragraph, Row, Table, document

BAR_CELLS = 20
SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&@$]|^[-+=])")


def to_markdown(profile: Profile) -> str:
    """Writes the whole report as GitHub-flavoured markdown."""
    parts = [f"## diagnose: {code(profile.run.script)}"]
    for title, blocks in document(profile):
        if title:
            parts.append(f"### {title}")
        parts += [part for part in map(block_markdown, blocks) if part]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Returns `text` so that no markup, mention or entity in it takes effect."""
    return SPECIAL.sub(r"\\\1", printable(text))


def prose(text: str) -> str:
    """Returns a sentence of ours, in which backticks mark code and all else is only text."""
    return "".join(code(piece) if is_code else escape(piece) for piece, is_code in spans(text))


def code(text: str) -> str:
    """Returns `text` as a code span."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{fence}{pad}{text or ' '}{pad}{fence}"


def sections(page: str) -> list[tuple[str, str]]:
    """Divides a page at its headings; returns each with its markdown, and first what stands before them."""
    first, *parts = f"\n{page}".split("\n## ")
    found = [("", first.strip())] if first.strip() else []
    for part in parts:
        heading, _, text = part.partition("\n")
        found.append((heading, textwrap.dedent(text).strip()))
    return found


def block_markdown(block: Block) -> str:
    """Writes one block of any kind; nothing for a bar of phases, which stands in the ledger's rows."""
    if isinstance(block, Paragraph):
        text = escape(block.text)
        text = f"**{text}**" if block.alarm else text
        return f"{text}\n\n{_code_block(block.code)}" if block.code else text
    if isinstance(block, Facts):
        return "\n".join(map(_fact, block.items))
    if isinstance(block, Card):
        return _card(block)
    if isinstance(block, Table):
        return _table(block)
    return ""


def _fact(fact: Fact) -> str:
    value = code(fact.value) if fact.code else f"**{escape(fact.value)}**"
    return f"- {escape(fact.label)}: {value}" + (f" ({escape(fact.detail)})" if fact.detail else "")


def _card(card: Card) -> str:
    parts = [f"#### {prose(card.title)}", ", ".join(map(code, card.tags))]
    parts.append("\n".join([*map(_fact, card.facts), *(f"- {prose(point)}" for point in card.points)]))
    parts.append(f"**To do:** {prose(card.advice)}" if card.advice else "")
    parts.append(_code_block(card.code) if card.code else "")
    parts.append(prose(card.caveat))
    return "\n\n".join(part for part in parts if part)


def _code_block(lines: str) -> str:
    return "\n".join(f"    {printable(line)}" for line in lines.splitlines())


def _table(table: Table) -> str:
    has_bar = any(row.share is not None for row in table.rows)
    columns = [*table.columns, *([Column(title=" ")] if has_bar else [])]
    has_source = any(row.source for row in table.rows)
    columns += [Column(title="source", code=True)] if has_source else []
    lines = [
        escape(table.caption) + "\n",
        "| " + " | ".join(escape(column.title) for column in columns) + " |",
        "|" + "|".join("---:" if column.number else "---" for column in columns) + "|",
    ]
    for row in table.rows:
        cells = [
            code(cell).replace("|", "\\|") if column.code and cell else escape(cell)
            for column, cell in zip(table.columns, row.cells, strict=True)
        ]
        cells += [_bar(row)] if has_bar else []
        cells += [code(row.source).replace("|", "\\|") if row.source else ""] if has_source else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _bar(row: Row) -> str:
    return PLAIN.bar(row.share or 0.0, BAR_CELLS)
