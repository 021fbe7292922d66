"""Memory grows with every step"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.program import Memory, Program
from diagnose.core.units import format_bytes
from diagnose.rules._compute import model_ns, of_model
from diagnose.rules._examples import profile
from diagnose.rules.base import WORTH_SHARE, Rule

MIN_GROWTH_BYTES = 100 * 2**20
"""Caches and arenas settle within less."""

MIN_BYTES_PER_STEP = 64 * 1024
"""A kept graph or batch is more than this; a kept number is not."""

NS_PER_BYTE = (0.05, 0.2, 0.5)
"""What fresh memory costs: the kernel clears each page of 4 KiB when it is first touched, which takes 0.2
to 2 us; memory that is used again needs none of it."""

MOST_SHARE = 0.5


def growing(total_bytes: int, steps: int = 400) -> Program:
    return Program(memory=Memory(rss_bytes=8 * 2**30, growth_bytes=total_bytes, growth_steps=steps))


class MemoryCreep(Rule):
    """
    ## What it means
    The process holds more memory after every step and gives none back: something is kept, most often a loss
    with its graph. Fresh memory is slower than used memory, and in the end there is none.

    ## What to do
    Keep numbers, not tensors: `losses.append(loss.item())`, or `loss.detach()`.

    ## When it is wrong
    A cache that is filled on purpose, such as a data set that is decoded once. Pages of a mapped file
    (`np.load(..., mmap_mode="r")`) are not counted: they are no memory that the process keeps.
    """

    needs = ("program.memory.growth_bytes",)
    explains = ("step-drift",)
    fires_on = (
        profile(step_ms=100, program=growing(20 * 2**30)),
        profile(step_ms=5, program=growing(2**30)),
    )
    silent_on = (
        profile(step_ms=100, program=growing(20 * 2**20)),
        profile(step_ms=100, program=growing(0)),
        profile(step_ms=1, program=growing(200 * 2**20, steps=100_000)),
    )

    def check(self, profile: Profile) -> Finding | None:
        memory = profile.program.memory
        assert memory.growth_bytes is not None
        steps = max(1, memory.growth_steps or 1)
        per_step = memory.growth_bytes / steps
        if memory.growth_bytes < MIN_GROWTH_BYTES or per_step < MIN_BYTES_PER_STEP:
            return None
        whole = model_ns(profile)
        low, expected, high = (min(cost * per_step, MOST_SHARE * whole) for cost in NS_PER_BYTE)
        if expected < WORTH_SHARE * profile.step_time_ns:
            return None
        full = ""
        if memory.total_bytes and memory.rss_bytes:
            left = (memory.total_bytes - memory.rss_bytes) / per_step
            full = f" At this rate memory is full after {left:,.0f} more steps."
        return Finding(
            rule=self.name,
            summary=f"Each step keeps {format_bytes(per_step)} of memory.",
            lost_ns=of_model(profile, expected / whole),
            low_ns=low,
            high_ns=high,
            assumption="fresh memory costs its clearing, and nothing else slows down",
            evidence=(
                f"The process grew by {format_bytes(memory.growth_bytes)} in {steps} steps, in every"
                f" quarter of the run.{full}",
            ),
            fix="Find what keeps a tensor of every step; a loss kept for a mean holds its whole graph.",
            code="losses.append(loss.item())",
        )
