"""Which rank of a job this process is: as its process group says, else the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def rank_of(environ: Mapping[str, str]) -> int:
    """Returns the rank that a launcher gave this process; 0 without one, and where it is no number."""
    return number_in(environ, "RANK") or 0


def place_of(facts: Mapping[str, Any]) -> tuple[int, int]:
    """Returns rank and world size.

    Args:
        facts: What the hooks have learnt; the process group's word counts more than the environment's.
    """
    if "place" in facts:
        rank, world_size = facts["place"]
        return int(rank), int(world_size)
    world_size = number_in(os.environ, "WORLD_SIZE")
    return rank_of(os.environ), 1 if world_size is None else world_size


def doubt_about(environ: Mapping[str, str]) -> str:
    """Says what is wrong with the environment's word on the rank; empty where nothing is."""
    text = environ.get("RANK", "")
    if not text or number_in(environ, "RANK") is not None:
        return ""
    return f"RANK is {text!r}, which is no number: unless it makes a process group this process is rank 0."


def number_in(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the number that a launcher put into a variable; `None` without one, and where it is none."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
