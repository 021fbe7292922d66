"""What the dashboard costs: its server, in time and bytes, and the job that trains beside it.

    python benchmarks/dashboard.py [--answers FILE] [--only PART ...] [--markdown FILE]

Pages: a run that goes on is opened in a real browser. First paint is the time from the navigation to the
first chart, or the first row of the list, on the screen, with an empty cache. Then the page is left open:
of each tick the slowest callback counts, by the server's time in it, and the bytes of all. See
`dashboard_pages.py`; the job beside it: `dashboard_beside.py`.

What was promised is judged: it exits with 1 where a median callback takes longer than 50 ms, a tick is
larger than 60 kB, or the job's threads may wait for a CPU longer while a page is open, by 1 % of the time.

It takes some eleven minutes. With `--answers` what was measured is kept in a file, and not measured again:
killed, or asked for a part at a time, it goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import dashboard_beside
import dashboard_pages
from dashboard_pages import ROW, View
from tuning import Answers

SHAPES = ((10_000, 1), (100_000, 1), (1_000_000, 1), (10_000, 64), (1_000_000, 64), (10_000, 1024))
"""Steps and ranks of the runs that are opened."""

LISTED = 500
"""Runs of the list; one of them goes on, with 64 ranks."""

MAX_CALLBACK_MS = 50.0
MAX_KILOBYTES = 60.0
MAX_LONGER = 0.01
FED_ENOUGH = 0.8
"""Where less was written than a job would write, the figures are of an easier case."""

HEADER = (
    "| steps | ranks | page | first paint (s) | callback (ms) | most | kB a tick | most | ticks | read |",
    "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*map(name_of, SHAPES), "list", "job"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="STEPSxRANKS, list, job")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each page is left open")
    parser.add_argument(
        "--turns", type=int, default=32, help="of four seconds each, in each arm of the job"
    )
    parser.add_argument("--answers", type=Path, help="keep what was measured in this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    answers, missed = Answers(args.answers), []
    lines = [
        f"Measured on {date.today()}: {platform.machine()}, {os.cpu_count()} CPUs, Python"
        f" {platform.python_version()}, load average {os.getloadavg()[0]:.1f} at the start;"
        f" {args.seconds:g} s per page. Printed by `benchmarks/dashboard.py`.",
        "",
    ]
    table: list[str] = []
    for shape in SHAPES:
        if name_of(shape) in args.only:
            views = dashboard_pages.views_of(*shape)
            rows = answers.of(
                name_of(shape), partial(dashboard_pages.measured, *shape, views, args.seconds)
            )
            table += [told(row, f"{shape[0]:,}", f"{shape[1]:,}", missed) for row in rows]
    if "list" in args.only:
        view = View(name=f"list of {LISTED} runs", address="/", useful=ROW)
        rows = answers.of(
            "list", partial(dashboard_pages.measured, 10_000, 64, [view], args.seconds, LISTED - 1)
        )
        table += [told(row, "", "", missed) for row in rows]
    if table:
        lines += [*HEADER, *table, ""]
    if "job" in args.only:
        lines += [beside(answers.of("job", partial(dashboard_beside.measured, args.turns)), missed), ""]
    lines += [f"Missed: {words}." for words in missed] or ["Every promise was kept."]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    if missed:
        raise SystemExit(1)


def name_of(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def told(row: Mapping[str, Any], steps: str, ranks: str, missed: list[str]) -> str:
    """Returns a row of the table; adds what it breaks."""
    where = " ".join(filter(None, (row["page"], steps and f"of {steps} steps", ranks and f"x {ranks}")))
    if row["callback_ms"] is not None and row["callback_ms"] > MAX_CALLBACK_MS:
        missed.append(f"{where}: a median callback took {row['callback_ms']:.0f} ms")
    if row["most_kilobytes"] is not None and row["most_kilobytes"] > MAX_KILOBYTES:
        missed.append(f"{where}: {row['most_kilobytes']:.0f} kB in a tick")
    if not row["ticks"]:
        missed.append(f"{where}: the page asked for nothing")
    if row["fed_share"] < FED_ENOUGH:
        missed.append(f"{where}: its job came to {row['fed_share']:.0%} of its pace on this machine")
    figures = (
        number(row["painted_s"], ".1f"),
        number(row["callback_ms"], ".1f"),
        number(row["most_ms"], ".0f"),
        number(row["kilobytes"], ".0f"),
        number(row["most_kilobytes"], ".0f"),
        str(row["ticks"]),
        f"{row['read_share']:.0%}",
    )
    return f"| {' | '.join((steps, ranks, row['page'], *figures))} |"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def beside(job: Mapping[str, Any], missed: list[str]) -> str:
    """Says what an open page cost the job; adds what that breaks."""
    lines = [
        f"The job beside it, steps of {job['step_ms']:.1f} ms, with a page open against without, in turns"
        f" of {4 * dashboard_beside.STRETCH_S:g} s:",
        "",
        "| job and dashboard | its threads waited longer for a CPU, of the time | 95 % interval"
        " | steps took longer by | 95 % interval | turns | dashboard, of one CPU |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for arm, words in (("apart", "pinned apart"), ("free", "where the system likes")):
        own = job[arm]
        lines.append(
            f"| {words} | {own['waits']:+.2%} | {own['waits_low']:+.2%} to {own['waits_high']:+.2%}"
            f" | {own['longer']:+.2%} | {own['low']:+.2%} to {own['high']:+.2%} | {own['turns']}"
            f" | {own['cpu_share']:.1%} |"
        )
        if own["waits_high"] > MAX_LONGER:
            missed.append(f"the job, {words}: it may wait {own['waits_high']:.2%} longer with a page open")
    left_out = sum(job[arm]["left_out"] for arm in dashboard_beside.ARMS)
    lines += [
        "",
        f"Asking the rules is apart from that: the first time took {job['first_analysis_s']:.1f} s of CPU"
        f" time, at the lowest priority, and all times {job['analyses_share']:.1%} of one CPU;"
        f" {left_out} turns in which it was done are left out above.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
