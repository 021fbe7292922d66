"""Writes what `optimizers.py` found, as JSON and as tables for a reader."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

from optimizer_goals import goal_lines

HEAD = (
    "| contender | GPU | wall | host | kernels | bandwidth | of copy | extra memory | off by | GPU: ours "
    "| wall: ours |"
)
MANY_LAUNCHES = 30
"""Of 1.24 billion elements in fp32: 60 are expected of lists of 4 KB, 9 of 32 KB."""

RULE = "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|"


def write(report: dict[str, Any], out: Path) -> None:
    """Replaces `optimizers.json` and `optimizers.md` in a folder."""
    for name, text in (
        ("optimizers.json", json.dumps(report, indent=1)),
        ("optimizers.md", "\n".join(markdown(report)) + "\n"),
    ):
        temporary = out / f".{name}"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out / name)


def markdown(report: dict[str, Any]) -> list[str]:
    """The lines of the tables."""
    machine, dry = report["machine"], report["dry_run"]
    copy = machine.get("copy_bytes_per_s")
    lines = [
        "# Optimizers on one GPU",
        "",
        f"{date.today()}: {machine.get('device', 'no device')}, torch {machine.get('torch', '?')}, CUDA "
        f"{machine.get('cuda')}; a copy within the device moves {tera(copy)} read plus written.",
        "",
        "Median and quartiles. GPU: between two events, the queue full. Wall: from an idle queue to an idle"
        " queue; host: of that, until the call came back. Bandwidth: bytes that the contender's passes come"
        " to, by count, over the GPU's time. Extra memory: the peak of one step. Off by: distance from"
        " float64 in parts of the way. The last two columns: how much faster than this contender the"
        " fastest of ours is, by the GPU's time and by the wall's; `cannot tell` where quartiles overlap.",
        "",
    ]
    if dry:
        lines += ["**A rehearsal on a CPU: nothing was timed.**", ""]
    for case in report["cases"]:
        if "contenders" in case:
            lines += case_lines(case, copy, dry=dry)
        else:
            lines += [f"## {case['case']}: failed", "", str(case["failure"]), ""]
    if report["not_reached"]:
        lines += [f"Not reached in the time there was: {', '.join(report['not_reached'])}."]
    if report.get("broke"):
        lines += ["", f"Processes that ended before their work did: {'; '.join(report['broke'])}."]
    losing = [f"{case['case']} ({names})" for case in report["cases"] if (names := losses(case))]
    if losing and not dry:
        lines += ["", f"Rows where ours lose: {'; '.join(losing)}."]
    return lines if dry else [*lines, "", *kernel_arguments(report), *goal_lines(report)]


def kernel_arguments(report: dict[str, Any]) -> list[str]:
    """How much torch tells a kernel at a time, by its launches: it is more from 2.13 on with CUDA 13, and
    its fused step then up to 1.14 times as fast."""
    for case in report["cases"]:
        for each in case.get("contenders", ()) if case["case"] == "A/Llama-1B" else ():
            if each["name"] == "torch fused" and each.get("launches"):
                num = each["launches"]["kernels"]
                size = "32" if num < MANY_LAUNCHES else "4"
                return [
                    f"torch's fused step of 1.24 billion elements is {num} launches: lists of {size} KB.",
                    "",
                ]
    return []


def case_lines(case: dict[str, Any], copy: float | None, *, dry: bool) -> list[str]:
    """One table."""
    best = best_of_ours(case)
    lines = [
        f"## {case['row']}: {case['title']}; {case['shape']}"
        + (", with what compiles" if case["case"].endswith("/compiled") else ""),
        "",
        f"{case['tensors']} tensors, {case['elements'] / 1e6:,.1f} million elements."
        + (f" {case['rounds']} rounds of turns only." if "rounds" in case else "")
        + (f" Cut off: {case['cut_off']}." if "cut_off" in case else ""),
        "",
        HEAD,
        RULE,
    ]
    for each in case["contenders"]:
        name = f"**{each['name']}**" if each["ours"] else each["name"]
        name += f" ({each['note']})" if each["note"] else ""
        if each["status"] != "measured":
            reason = str(each.get("reason", "")).splitlines()[:1]
            lines.append(f"| {name} | {each['status']}: {''.join(reason)[:120]} " + "| " * 10 + "|")
            continue
        extra, speed = each["extra_bytes"], bytes_per_s(case, each)
        cells = [
            name,
            *("-" if dry else spread(each[which]) for which in ("gpu_ns", "wall_ns", "host_ns")),
            "-" if dry and not each["ours"] else count(each["launches"]),
            "-" if dry else tera(speed),
            "-" if dry or speed is None or not copy else f"{speed / copy:.0%}",
            "-" if extra is None else f"{extra / 2**20:,.1f} MiB",
            f"{each['error']:.1g}",
            *(
                "-" if dry or each is best or best is None else verdict(best[which], each[which])
                for which in ("gpu_ns", "wall_ns")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def best_of_ours(case: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest of ours on the GPU."""
    mine = [each for each in case["contenders"] if each["ours"] and each["status"] == "measured"]
    return min(mine, key=lambda each: float(each["gpu_ns"]["median"]), default=None)


def verdict(mine: dict[str, float], other: dict[str, float]) -> str:
    """Who is faster, and by how much."""
    ratio = other["median"] / mine["median"]
    if mine["q3"] < other["q1"]:
        return f"{ratio:.2f} x as fast"
    if mine["q1"] > other["q3"]:
        return f"SLOWER: {ratio:.2f} x"
    return f"cannot tell ({ratio:.2f} x)"


def losses(case: dict[str, Any]) -> str:
    """Which contenders are faster than the fastest of ours."""
    best = best_of_ours(case) if "contenders" in case else None
    if best is None:
        return ""
    return ", ".join(
        each["name"]
        for each in case["contenders"]
        if each["status"] == "measured" and verdict(best["gpu_ns"], each["gpu_ns"]).startswith("SLOWER")
    )


def bytes_per_s(case: dict[str, Any], each: dict[str, Any]) -> float | None:
    """What a contender moves by count over the time that it takes."""
    if each["bytes_per_element"] is None:
        return None
    return float(each["bytes_per_element"] * case["elements"] / (each["gpu_ns"]["median"] / 1e9))


def count(launches: dict[str, Any] | None) -> str:
    """Of kernels, and of copies and fills."""
    if launches is None:
        return "?"
    copies = f" + {launches['copies']} copies" if launches["copies"] else ""
    return f"{launches['kernels']}{copies}"


def spread(times: dict[str, float]) -> str:
    """Microseconds or milliseconds, with the quartiles."""
    unit, name = (1e6, "ms") if times["median"] >= 1e6 else (1e3, "us")
    return f"{times['median'] / unit:.3g} {name} ({times['q1'] / unit:.3g}-{times['q3'] / unit:.3g})"


def tera(speed: float | None) -> str:
    """Bytes per second."""
    return "-" if speed is None else f"{speed / 1e12:.2f} TB/s"
