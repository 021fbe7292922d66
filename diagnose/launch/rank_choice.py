"""Which ranks of a job record: all, the first, a sample, or those of a list.

Every rank decides by itself, from what the launcher put into its environment: there is nobody to ask before
the script has made a process group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from diagnose.launch.place import number_in

ALL, FIRST, SAMPLE = "all", "first", "sample"

SPREAD = 64
"""Ranks of a sample besides one of each host: enough to see what is usual, few enough for any disk."""

LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def is_choice(text: str) -> bool:
    """Whether a text names ranks: `all`, `first`, `sample`, or numbers and ranges such as `0,1,8-15`."""
    if text in (ALL, FIRST, SAMPLE):
        return True
    is_list = LIST.fullmatch(text.replace(" ", "")) is not None
    return is_list and all(int(low) <= int(high or low) for low, high in _ranges(text))


def records(choice: str, environ: Mapping[str, str]) -> bool:
    """Whether the rank of this process is one of those chosen. One without a rank, or alone, always is.

    Args:
        choice: As `is_choice` accepts it; empty for all.
        environ: The environment that torchrun made.
    """
    rank, world_size = number_in(environ, "RANK"), number_in(environ, "WORLD_SIZE")
    if choice in ("", ALL) or rank is None or (world_size or 1) < 2:
        return True
    if choice == FIRST:
        return rank == 0
    if choice == SAMPLE:
        local_rank = number_in(environ, "LOCAL_RANK")
        return in_sample(rank, world_size or 1, local_rank, number_in(environ, "LOCAL_WORLD_SIZE"))
    return any(int(low) <= rank <= int(high or low) for low, high in _ranges(choice))


def in_sample(rank: int, world_size: int, local_rank: int | None, local_size: int | None) -> bool:
    """Whether a rank is in the sample: the first; one of each host, its place there another on the next
    host; and some `SPREAD` over the job, likewise.

    Args:
        rank: The rank.
        world_size: Ranks of the job.
        local_rank: Its place on its host; `None` where the launcher does not say.
        local_size: Ranks on its host.
    """
    stride = max(1, world_size // SPREAD)
    number, offset = divmod(rank, stride)
    # Steps of one more than the stride: with a stride of whole hosts all would have one place on theirs.
    if offset == number % stride and (number < SPREAD or stride == 1):
        return True
    if local_rank is None or not local_size:
        return False
    return local_rank == (rank - local_rank) // local_size % local_size


def _ranges(choice: str) -> list[tuple[str, str]]:
    parts = [part.partition("-") for part in choice.replace(" ", "").split(",")]
    return [(low, high) for low, _, high in parts]
