"""Asks, in a process of its own, whether a rule of a running job misses what a deep window tells."""

from __future__ import annotations

from pathlib import Path

TOLD = (
    "device.busy_share",
    "device.launch_bound_ns",
    "device.num_kernels",
    "device.tensor_core_share",
    "device.matmul_share",
    "device.layout_share",
)
"""The readings of `core.profile` that a window is one source of. A rule whose `needs` name one declares by
that that a window would help it."""


def answer(folder: str) -> list[str]:
    """Returns the names of the rules that abstain for want of what a window tells; see `tuner.question`."""
    from diagnose.analysis.profile import load_profile
    from diagnose.rules import diagnosed
    from diagnose.rules._engine import reading, rules

    profile = diagnosed(load_profile(Path(folder), alone=True))
    told = {name for name in TOLD if reading(profile, name) is None}
    known = rules()
    return [each.rule for each in profile.abstained if told.intersection(known[each.rule].needed(profile))]
