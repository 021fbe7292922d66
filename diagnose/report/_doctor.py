"""What `diagnose doctor` found, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from diagnose.core.checkup import Check
from diagnose.core.machine import DeviceRates, Rate
from diagnose.report._terminal import Terminal
from diagnose.report._wording import printable

SIGNS = {True: "yes", False: "no", None: "-"}


def doctor_text(checks: Sequence[Check], rates: Sequence[DeviceRates], terminal: Terminal) -> str:
    """Returns the checks, one per line or so, and what the devices reach."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        head = f"{check.name:<{width}}  {SIGNS[check.ok]:<3}  "
        words = textwrap.wrap(printable(check.words), terminal.width - len(head)) or [""]
        lines.append(f"{head}{terminal.clean(words[0])}")
        lines += [f"{' ' * len(head)}{terminal.clean(more)}" for more in words[1:]]
    lines.append("")
    if not rates:
        lines.append("What the devices reach has not been measured: diagnose doctor --measure")
    for each in rates:
        lines.append(terminal.clean(f"{each.device}: {each.driver}, torch {each.torch}"))
        lines.append(f"  {'copy':<9} {_rate(each.copy_bytes, 1e9)} GB/s read and written")
        lines += [f"  {dtype:<9} {_rate(rate, 1e12)} TFLOP/s" for dtype, rate in each.flops.items()]
    return "".join(f"{line}\n" for line in lines)


def doctor_json(checks: Sequence[Check], rates: Sequence[DeviceRates]) -> dict[str, Any]:
    """Returns the same as JSON."""
    return {
        "schema": 1,
        "checks": [asdict(check) for check in checks],
        "rates": [asdict(each) for each in rates],
    }


def _rate(rate: Rate, unit: float) -> str:
    return f"{rate.median / unit:.3g} ({rate.low / unit:.3g} to {rate.high / unit:.3g})"
