"""What the operating system said of cores and disks, where it is out of the ordinary."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.host import HostStats
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes
from diagnose.report.base import Block, Fact, Facts, Section
from diagnose.rules._machine import FULL_CORES, traffic, waits_for_disk


class Machine(Section):
    """Full cores, waits for a disk, and traffic with it; what says nothing is left out."""

    order = 57
    title = "Machine"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        items = (*_cores(profile.host), *_disk(profile.host))
        return [Facts(items=items)] if items else []


def _cores(host: HostStats) -> list[Fact]:
    full, cpus = host.full_cores, host.cpus
    if full is None or cpus is None or cpus < 2 or full < FULL_CORES:
        return []
    return [Fact(label="full cores", value=f"{full:.1f}", detail=f"of {cpus}, busy all the time")]


def _disk(host: HostStats) -> list[Fact]:
    items = []
    if waits_for_disk(host):
        items.append(
            Fact(
                label="CPUs kept idle",
                value=f"{host.iowait_cpus:.1f}",
                detail="on average, while a process waited for a disk",
            )
        )
    labels = {"read": "read from storage", "wrote": "written to storage"}
    items += [
        Fact(label=labels[verb], value=f"{format_bytes(rate)}/s", detail="by this process")
        for verb, rate in traffic(host)
    ]
    return items
