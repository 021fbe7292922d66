"""Which rank of a job this process is: as its process group says, else the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def rank_of(environ: Mapping[str, str]) -> int:
    """Returns the rank that a launcher gave this process; 0 without one, and where it is no number."""
    return _number(environ, "RANK", 0)


def place_of(facts: Mapping[str, Any]) -> tuple[int, int]:
    """Returns rank and world size.

    Args:
        facts: What the hooks have learnt; the process group's word counts more than the environment's.
    """
    if "place" in facts:
        rank, world_size = facts["place"]
        return int(rank), int(world_size)
    return rank_of(os.environ), _number(os.environ, "WORLD_SIZE", 1)


def doubt_about(environ: Mapping[str, str]) -> str:
    """Says what is wrong with the environment's word on the rank; empty where nothing is."""
    text = environ.get("RANK", "")
    if not text or _is_number(text):
        return ""
    return f"RANK is {text!r}, which is no number: unless it makes a process group this process is rank 0."


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    return int(text) if _is_number(text) else default


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
