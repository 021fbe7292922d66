"""The kernels of a deep window: which run, how long, and how far from what the device could do."""

from __future__ import annotations

from collections.abc import Mapping

from diagnose.dashboards._look_blocks import Component, empty, panel, shown
from diagnose.dashboards._look_run import RunPage
from diagnose.dashboards._snapshot import Snapshot

from diagnose.core.deep_window import DeepWindow
from diagnose.core.device import Device
from diagnose.core.units import format_bytes, format_share
from diagnose.report.base import Column, Fact, Facts, Row, Table
from diagnose.report.deep_window import classes, facts, hottest, roofline, taken, waiting

MAX_LISTED = 25


class Kernels(RunPage):
    """The device, the optimizers that launch its kernels, and the deep window, where one was taken."""

    name = "kernels"
    title = "Kernels"
    order = 50

    def draw(self, snap: Snapshot, query: Mapping[str, str]) -> list[Component]:
        profile = snap.profile
        window = profile.deep_window if profile is not None else None
        made = [*_window(window)] if window is not None else [_none_taken()]
        said = _device(profile.device) if profile is not None else []
        if said:
            made.append(panel("The device over the measured steps", *shown([Facts(items=tuple(said))])))
        if profile is not None and profile.program.optimizers:
            table = Table(
                caption="What launches kernels beside the model itself.",
                columns=(
                    Column(title="optimizer", code=True),
                    Column(title="tensors", number=True),
                    Column(title="elements", number=True),
                ),
                rows=tuple(
                    Row(cells=(each.kind, f"{each.num_tensors:,}", f"{each.num_elements:,}"))
                    for each in profile.program.optimizers
                ),
            )
            made.append(panel("Optimizers", *shown([table])))
        return made


def _window(window: DeepWindow) -> list[Component]:
    made = [panel("Deep window", *shown([Facts(items=tuple(facts(window)))]), note=taken(window))]
    if window.trace.classes:
        made.append(panel("By class", *shown([classes(window)])))
    roof = roofline(window)
    if roof is not None:
        made.append(panel("Roofline", *shown([roof])))
    elif window.counted is not None and window.counted.flops and window.rates is None:
        words = "What this device reaches has not been measured here; it takes a minute."
        made.append(empty("No roofline", words, "diagnose doctor --measure"))
    if window.trace.top:
        what = "Kernels" if window.trace.on_device else "Operations"
        made.append(panel(what, *shown([hottest(window, MAX_LISTED)])))
    waits = waiting(window)
    if waits is not None:
        made.append(panel("Waits", *shown([waits])))
    return made


def _none_taken() -> Component:
    words = (
        "A deep window records every operation of a few steps. None was taken in this run, so nothing is"
        " known of single kernels here; the phases on the overview are measured all the same."
    )
    return empty("No deep window was taken", words, "diagnose run --deep-window 100 train.py")


def _device(device: Device) -> list[Fact]:
    """Returns what the device itself said; what it was not asked is left out."""
    shares = (
        ("busy", device.busy_share, "of the time some kernel ran"),
        ("on tensor cores", device.tensor_core_share, "of the kernel time"),
        ("matrix products", device.matmul_share, "and convolutions, of the busy time"),
        ("layout conversions", device.layout_share, "of the busy time"),
        ("clock", device.clock_share, "of its highest, on average"),
        ("throttled", device.throttle_share, "of the time, by power or heat"),
    )
    facts = [Fact(label="device", value=device.name)] if device.name else []
    if device.num_kernels is not None:
        facts.append(Fact(label="kernels", value=f"{device.num_kernels:,.0f}", detail="per step"))
    facts += [
        Fact(label=name, value=format_share(share), detail=of)
        for name, share, of in shares
        if share is not None
    ]
    if device.peak_bytes is not None:
        facts.append(
            Fact(label="memory", value=format_bytes(device.peak_bytes), detail="at most, by tensors")
        )
    return facts
