"""What a deep window recorded: kernels by class, waits, and how far from what the device reaches."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.deep_window import DeepWindow, Trace, WorkClass
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_S, format_bytes, format_duration, format_ms, format_share
from diagnose.report._charts import Roof, Roofline
from diagnose.report._wording import place, plural
from diagnose.report.base import Block, Column, Fact, Facts, Paragraph, Row, Section, Table

MAX_ROWS = 15
"""Kernels listed in a report; the dashboard lists all that were kept."""


class DeepWindowSection(Section):
    """The newest deep window of the run, where one was taken."""

    order = 35
    title = "Deep window"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        window = profile.deep_window
        if window is None:
            return []
        made: list[Block] = [Paragraph(text=taken(window)), Facts(items=tuple(facts(window)))]
        roof = roofline(window)
        made += [roof] if roof is not None else []
        made += [classes(window), hottest(window, MAX_ROWS)] if window.trace.classes else []
        waits = waiting(window)
        return [*made, waits] if waits is not None else made


def taken(window: DeepWindow) -> str:
    """Says what was recorded, and at what price."""
    first, last = window.first_step, window.first_step + window.num_steps - 1  # as --deep-window counts
    which = f"Step {first:,} was" if window.num_steps == 1 else f"Steps {first:,} to {last:,} were"
    price = (
        f" {plural(window.left_out, 'step')} that it slowed down are in no other figure: starting took the"
        f" training {format_duration(window.start_ns)}, stopping {format_duration(window.stop_ns)}, and"
        f" writing went on beside it for {format_duration(window.export_ns)}."
    )
    if window.trace.damaged:
        price += " The trace cannot be read to its end."
    elif window.cut:
        price += " The end of the trace was left out: it had become too large."
    if not window.trace.is_whole and not window.trace.on_device:
        price += (
            " It has no kernel, though the model is on a device: the driver recorded none, as where another"
            " tool records already. So nothing is said of the device."
        )
    elif not window.trace.is_whole:
        share = format_share(window.trace.launched_share or 0.0)
        price += (
            f" It has the kernels of {share} of the launches alone, as the others ended after it or were"
            " left out: what is said per step is of these, and no rate is."
        )
    return f"{which} recorded on rank {window.rank}, asked for by {window.asked_by}.{price}"


def facts(window: DeepWindow) -> list[Fact]:
    """Returns the figures of a window; what it could not measure is left out."""
    trace, steps = window.trace, max(1, window.num_steps)
    whole = window.wall_ns or trace.span_ns
    made = [Fact(label="step", value=format_ms(whole / steps), detail="while it was recorded")]
    if trace.on_device:
        made += _device_facts(trace, steps, whole)
    elif trace.classes:
        count = sum(each.count for each in trace.classes) / steps
        made.append(Fact(label="operations", value=f"{count:,.0f}", detail="per step, on the CPU"))
    if window.counted is not None and window.counted.flops:
        done = f"{window.counted.flops / 1e9:,.3g} GFLOP"
        made.append(Fact(label="products", value=done, detail=f"per step, of {window.counted.dtype}"))
        if window.mfu is not None and window.rates is not None:
            reached = f"of the {window.rates.flops_per_s / 1e12:,.3g} TFLOP/s of one large product"
            made.append(Fact(label="utilisation", value=format_share(window.mfu), detail=reached))
    elif window.why_not_counted:
        made.append(Fact(label="products", value="not counted", detail=window.why_not_counted))
    return made


def _device_facts(trace: Trace, steps: int, whole: int) -> list[Fact]:
    made = [Fact(label="device", value=trace.device)] if trace.device else []
    shares = []
    if trace.is_whole:
        made.append(Fact(label="kernels", value=f"{trace.num_kernels / steps:,.0f}", detail="per step"))
        shares.append(("busy", trace.busy_ns / whole, "of the time the device did something"))
    if trace.is_whole and trace.launch_bound_ns is not None:
        shares.append(
            ("launch-bound", trace.launch_bound_ns / whole, "idle while the host was in an operation")
        )
    if trace.is_whole and trace.communication_ns:
        shares.append(
            ("exposed communication", trace.exposed_ns / whole, "of the time, with nothing computed")
        )
    if trace.kernel_ns:
        shares.append(("tensor cores", trace.tensor_core_ns / trace.kernel_ns, "of the kernels' time"))
    shares.append(("waits", trace.sync_ns / whole, "of the time the host waited for the device"))
    return made + [Fact(label=name, value=format_share(share), detail=of) for name, share, of in shares]


def classes(window: DeepWindow) -> Table:
    """Returns time, bytes and products by class."""
    trace, steps = window.trace, max(1, window.num_steps)
    whole = sum(each.total_ns for each in trace.classes) or 1
    known = window.counted.work if window.counted is not None and trace.is_whole else ()
    counted = {each.work: each for each in known}
    rows = []
    for each in trace.classes:
        work, per_step = counted.get(each.work), each.total_ns / steps
        moved = work.num_bytes * NS_PER_S / per_step if work is not None and per_step else 0.0
        done = work.flops * NS_PER_S / per_step if work is not None and per_step else 0.0
        rows.append(
            Row(
                cells=(
                    each.work.value,
                    f"{each.count / steps:,.0f}",
                    format_ms(per_step),
                    format_share(each.total_ns / whole),
                    f"{format_bytes(moved)}/s" if moved and each.work is not WorkClass.OTHER else "",
                    f"{done / 1e9:,.3g}" if done else "",
                ),
                share=each.total_ns / whole,
            )
        )
    what = "Kernels and copies" if trace.on_device else "Operations on the CPU"
    return Table(
        caption=f"{what} by what they are for. Rates are of the tensors that they read and write.",
        columns=(
            Column(title="class"),
            Column(title="per step", number=True),
            Column(title="time", number=True),
            Column(title="share", number=True),
            Column(title="memory", number=True),
            Column(title="GFLOP/s", number=True),
        ),
        rows=tuple(rows),
    )


def hottest(window: DeepWindow, most: int) -> Table:
    """Returns the kernels or operations that took longest."""
    trace, steps = window.trace, max(1, window.num_steps)
    whole = sum(each.total_ns for each in trace.classes) or 1
    what = "kernel" if trace.on_device else "operation"
    return Table(
        caption=f"The {what}s that took longest"
        + ("." if trace.on_device else ", each without the time of those inside it."),
        columns=(
            Column(title=what, code=True),
            Column(title="class"),
            Column(title="per step", number=True),
            Column(title="time", number=True),
            Column(title="share", number=True),
        ),
        rows=tuple(
            Row(
                cells=(
                    short_name(each.name),
                    each.work.value + (", tensor cores" if each.tensor_core else ""),
                    f"{each.count / steps:,.0f}",
                    format_ms(each.total_ns / steps),
                    format_share(each.total_ns / whole),
                ),
                share=each.total_ns / whole,
            )
            for each in trace.top[:most]
        ),
    )


def waiting(window: DeepWindow) -> Table | None:
    """Returns where the host waits for the device, with the line; `None` where it does not."""
    trace, steps = window.trace, max(1, window.num_steps)
    rows = [(sync.what, place(sync), sync.count / steps, sync.blocked_ns / steps) for sync in trace.syncs]
    if window.counted is not None and trace.on_device:
        named = {(sync.file, sync.line) for sync in trace.syncs}
        rows += [
            (f"{sync.what}, in the counted step", place(sync), sync.count, sync.blocked_ns)
            for sync in window.counted.lines
            if sync.file and (sync.file, sync.line) not in named
        ]
    if not rows:
        return None
    return Table(
        caption="Where the host waits for the device.",
        columns=(
            Column(title="call", code=True),
            Column(title="line", code=True),
            Column(title="per step", number=True),
            Column(title="waited", number=True),
        ),
        rows=tuple(
            Row(cells=(what, where, f"{count:,.3g}", format_ms(time))) for what, where, count, time in rows
        ),
    )


def roofline(window: DeepWindow) -> Roofline | None:
    """Returns the products and the whole step under the device's roof; `None` without either."""
    counted, rates = window.counted, window.rates
    if counted is None or rates is None or not counted.flops or not window.trace.is_whole:
        return None
    steps = max(1, window.num_steps)
    times = {each.work: each.total_ns / steps for each in window.trace.classes}
    roofs = [
        Roof(
            label=each.work.value,
            flops_per_byte=each.flops / each.num_bytes,
            flops_per_s=each.flops * NS_PER_S / times[each.work],
        )
        for each in counted.work
        if each.flops and each.num_bytes and times.get(each.work)
    ]
    num_bytes = sum(each.num_bytes for each in counted.work)
    if window.step_ns and num_bytes:
        roofs.append(
            Roof(
                label="whole step",
                flops_per_byte=counted.flops / num_bytes,
                flops_per_s=counted.flops * NS_PER_S / window.step_ns,
            )
        )
    if not roofs:
        return None
    return Roofline(
        title=f"Rate of the {counted.dtype} products over their arithmetic intensity, under what"
        f" {rates.device} reached when it was measured",
        bytes_per_s=rates.copy_bytes_per_s,
        flops_per_s=rates.flops_per_s,
        points=tuple(roofs),
    )


def short_name(kernel: str) -> str:
    """Returns a kernel's name without its return type and what no reader needs of its arguments."""
    name = kernel.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= 90 else f"{name[:87]}..."
