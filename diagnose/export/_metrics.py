"""A reading as metrics with names, units and attributes, for tools that scrape or are pushed to.

Names and units are written as OpenTelemetry has them; Prometheus derives its own from these by the rules
that OpenTelemetry has set for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os.path import basename

from diagnose import __version__
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_S, NS_PER_US
from diagnose.export._reading import Reading, clean, finite

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric with its values.

    Attributes:
        name: With dots, without unit.
        unit: In UCUM's code; in braces what is counted.
        help: What it is, in a sentence.
        is_counter: Whether it only grows while a run lasts.
        values: Each with the attributes that tell it from the others.
    """

    name: str
    unit: str
    help: str
    is_counter: bool = False
    values: tuple[tuple[Labels, float], ...]


NAMES: dict[str, tuple[str, str, bool]] = {
    "diagnose.run": ("", "What runs; always 1.", False),
    "diagnose.run.active": ("", "Whether the run goes on: 1, or 0 once it is over.", False),
    "diagnose.steps": ("{step}", "Training steps that ended.", True),
    "diagnose.samples": ("{sample}", "Samples trained on.", True),
    "diagnose.tokens": ("{token}", "Tokens trained on.", True),
    "diagnose.phase.time": ("s", "Time of the training thread in each phase of its steps.", True),
    "diagnose.events": ("{event}", "What happened beside the steps, such as garbage collections.", True),
    "diagnose.step.duration": ("s", "Mean time of the newest steps.", False),
    "diagnose.step.timestamp": ("s", "When the newest step ended, in seconds since 1970.", False),
    "diagnose.throughput.samples": ("{sample}/s", "Samples per second over the newest steps.", False),
    "diagnose.process.memory": ("By", "Resident memory of the training process.", False),
    "diagnose.finding.lost": ("s", "Time of each step that a fault costs.", False),
    "diagnose.finding.gain": ("1", "How many times faster training would be without a fault.", False),
    "diagnose.tuning.gain": ("1", "How many times faster what tuning kept is, measured in pairs.", False),
    "diagnose.overhead": ("s", "What measuring costs of each step.", False),
}
"""Unit, help and whether it only grows, by name; in the order in which they are exported."""


def metrics_of(reading: Reading) -> list[Metric]:
    """Returns the metrics that have a value; what was not measured has none."""
    # By their attributes: two values of the same series would make Prometheus refuse the whole file.
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in NAMES}
    for name, labels, value in (*_of_run(reading), *_of_ranks(reading), *_of_findings(reading.profile)):
        number = finite(value)
        if number is not None:
            values[name].setdefault(tuple((key, clean(text)) for key, text in labels.items()), number)
    return [
        Metric(
            name=name,
            unit=unit,
            help=help,
            is_counter=is_counter,
            values=tuple((dict(labels), value) for labels, value in values[name].items()),
        )
        for name, (unit, help, is_counter) in NAMES.items()
        if values[name]
    ]


Values = Iterator[tuple[str, Labels, float | None]]


def _of_run(reading: Reading) -> Values:
    run = reading.profile.run
    about = {
        "script": basename(run.script) or run.script,
        "device": run.device,
        "torch": run.torch or "",
        "status": reading.profile.status.value,
        "version": __version__,
    }
    yield "diagnose.run", about, 1.0
    yield "diagnose.run.active", {}, 0.0 if reading.is_last else 1.0


def _of_ranks(reading: Reading) -> Values:
    for rank in reading.ranks:
        who = {"rank": rank.name, "host": rank.host}
        yield "diagnose.steps", who, rank.num_steps
        yield "diagnose.samples", who, rank.samples or None
        yield "diagnose.tokens", who, rank.tokens or None
        for phase, time_ns in rank.phase_ns.items():
            yield "diagnose.phase.time", {**who, "phase": phase.value}, time_ns / NS_PER_S
        for kind, count in sorted(rank.num_events.items()):
            yield "diagnose.events", {**who, "kind": kind}, count
        yield "diagnose.step.duration", who, rank.step_ns / NS_PER_S if rank.step_ns is not None else None
        yield "diagnose.step.timestamp", who, rank.last_unix
        yield "diagnose.throughput.samples", who, rank.samples_per_s
        yield "diagnose.process.memory", who, rank.resident_bytes


def _of_findings(profile: Profile) -> Values:
    for finding in profile.findings:
        place = f"{basename(finding.file)}:{finding.line}" if finding.file else ""
        what = {"rule": finding.rule, "place": place}
        if finding.ranks:
            what["ranks"] = ",".join(map(str, finding.ranks))
        yield "diagnose.finding.lost", what, finding.lost_ns_per_step / NS_PER_S
        yield "diagnose.finding.gain", what, finding.gain(profile.step_time_ns).speedup
    tuning = profile.tuning
    confirmed = tuning.confirmation if tuning is not None and tuning.kept else None
    yield "diagnose.tuning.gain", {}, confirmed.speedup if confirmed is not None else None
    cost_us = profile.overhead.us_per_step
    yield "diagnose.overhead", {}, cost_us * NS_PER_US / NS_PER_S if cost_us is not None else None
