"""How far into its slot a sample was taken.

A loop does the same things in the same order in every step, so the moment at which a sample was taken says
nearly as much as the line it shows. How much time all steps spend at each such moment is known exactly, so
the samples only have to divide moments at which now one line runs and now another.

A *place* is a class of such moments, an eighth of an octave wide; 0 stands for an unknown one. A sample's
slot and place are kept in one number.
"""

from __future__ import annotations

from typing import Final

UNIT_BITS: Final = 14
"""The first places are 2 ** 14 ns wide each."""

PLACES: Final = 160
"""The last place begins after a minute."""

_STEPS: Final = 8
"""Places in an octave."""

_SLOTS: Final = 32
"""More than there are slots."""


def place_of(since_ns: int) -> int:
    """Returns the place that lies so many nanoseconds after the slot began."""
    units = max(0, since_ns) >> UNIT_BITS
    octave = max(0, units.bit_length() - 4)
    return min(1 + _STEPS * octave + (units >> octave), PLACES)


def begins_ns(place: int) -> int:
    """Returns how long after its slot began a place does; see `place_of`."""
    octave = max(0, (place - 1) // _STEPS - 1)
    return (place - 1 - _STEPS * octave) << (octave + UNIT_BITS)


def coded(slot: int, place: int) -> int:
    """Returns the number that stands for both."""
    return place * _SLOTS + slot


def decoded(code: int) -> tuple[int, int]:
    """Returns slot and place."""
    return code % _SLOTS, code // _SLOTS
