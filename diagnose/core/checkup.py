"""What a machine lets `diagnose` measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at.

    Attributes:
        name: What.
        ok: Whether all that needs it can be measured here; `None` for plain information.
        words: How it stands; where something cannot be measured, why, and what would change that.
    """

    name: str
    ok: bool | None
    words: str
