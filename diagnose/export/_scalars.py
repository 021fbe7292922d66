"""A reading as scalars by step, and as text, for tools that track experiments."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import basename

from diagnose.core.phases import Phase
from diagnose.export._reading import Point, Reading, clean, finite


def scalars_of(point: Point) -> dict[str, float]:
    """Returns what is known of some steps, by name; what was not measured is left out."""
    values: dict[str, float | None] = {
        "diagnose/samples_per_s": point.samples_per_s,
        "diagnose/tokens_per_s": point.tokens_per_s,
        "diagnose/step_ms": point.step_ms,
        **{f"diagnose/phase_ms/{phase.value}": point.phase_ms.get(phase) for phase in Phase},
    }
    return {name: number for name, value in values.items() if (number := finite(value)) is not None}


def about(reading: Reading) -> Mapping[str, str]:
    """Returns what the run was, by name."""
    run = reading.profile.run
    return {
        "diagnose.run": clean(run.id),
        "diagnose.script": clean(basename(run.script) or run.script),
        "diagnose.status": reading.profile.status.value,
        "diagnose.world_size": str(run.world_size),
        "diagnose.device": clean(run.device),
        "diagnose.torch": clean(run.torch or ""),
    }


def summary_of(reading: Reading) -> dict[str, float]:
    """Returns the figures of the whole run, by name."""
    profile = reading.profile
    values: dict[str, float | None] = {
        "diagnose/summary/samples_per_s": profile.throughput.samples_per_s,
        "diagnose/summary/step_ms": profile.steps.mean_ns / 1e6 if profile.steps.mean_ns else None,
        **{f"diagnose/summary/share/{phase.value}": profile.share(phase) for phase in Phase},
        **{
            f"diagnose/summary/lost_ms/{clean(finding.rule)}": finding.lost_ns_per_step / 1e6
            for finding in profile.findings
        },
    }
    return {name: number for name, value in values.items() if (number := finite(value)) is not None}


def report_of(reading: Reading) -> str:
    """Returns the whole report as markdown."""
    from diagnose.report import to_markdown

    return clean(to_markdown(reading.profile))
