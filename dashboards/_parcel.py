"""What a page sends in one tick: what has waited longest, and no more than a tick may hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dash
from plotly.io.json import to_json_plotly

TICK_BYTES = 54_000
"""Beside it goes which part of the page is meant, and what it has now: 60 kB are promised."""

AT_ONCE, NEVER = -2, -1


class Part:
    """A list of components on a page, of which only those that changed are sent.

    Args:
        name: Of the list.
        stamps: Of the components that the page has, in order.

    Attributes:
        name: Likewise.
        stamps: Likewise, with what `answer` sends.
        is_new: Whether nothing that the page has of it stays.
    """

    def __init__(self, name: str, stamps: Sequence[str]) -> None:
        self.name = name
        self.stamps = list(stamps)
        self._made: Sequence[Any] | None = None
        self.is_new = False

    def becomes(self, made: Sequence[Any]) -> None:
        """Says what the list shall be."""
        self._made = made
        if len(made) < len(self.stamps) or not self.stamps:
            self.is_new, self.stamps = True, []

    def pieces(self) -> dict[str, Any]:
        """Returns the components that the page lacks, by name."""
        named = {f"{self.name}/{place}": each for place, each in enumerate(self._made or ())}
        if not self.is_new:
            known = {f"{self.name}/{place}": stamp for place, stamp in enumerate(self.stamps)}
            named = {name: each for name, each in named.items() if stamp_of(each) != known.get(name)}
        return named

    @property
    def is_short(self) -> bool:
        """Whether the page lacks something of it, once `answer` was sent."""
        return self._made is not None and self.stamps != [stamp_of(each) for each in self._made]

    def answer(self, taken: Iterable[str]) -> Any:
        """Returns what the page gets of the pieces that go now."""
        pieces = self.pieces()
        sent = {int(name.rpartition("/")[2]): pieces[name] for name in taken if name in pieces}
        if self.is_new:
            assert list(sent) == list(range(len(sent))), "none overtakes another"
            self.stamps = [stamp_of(piece) for piece in sent.values()]
            return list(sent.values())
        if not sent:
            return dash.no_update
        patch = dash.Patch()
        for place, piece in sent.items():
            if place < len(self.stamps):
                patch[place] = piece
                self.stamps[place] = stamp_of(piece)
            else:
                patch.append(piece)
                self.stamps.append(stamp_of(piece))
        return patch


class Parcel:
    """One tick.

    Args:
        version: Of what is shown.
        sent: By the name of each piece, the version that it was sent with last; `None` for a page that has
            just been opened, which is sent whole.

    Attributes:
        sent: Likewise, with what goes now.
        taken: The names of the pieces that go now, in the order in which they were taken.
        is_full: Whether something has to wait for the next tick.
    """

    def __init__(self, version: int, sent: Mapping[str, int] | None) -> None:
        self.sent = dict(sent or {})
        self.taken: list[str] = []
        self.is_full = False
        self._version = version
        self._room = float("inf") if sent is None else TICK_BYTES

    def must_hold(self, piece: Any) -> None:
        """Takes what no tick goes without."""
        self._room -= size_of(piece)

    def fill(
        self, pieces: Mapping[str, Any], parts: Sequence[Part] = (), first: Sequence[str] = ()
    ) -> None:
        """Takes what has waited longest, as much as there is room for.

        Of those that waited equally long the first comes first, and none overtakes another. One goes in
        any case: a piece that is larger than a tick must not wait for ever.

        Args:
            pieces: By name.
            parts: Lists, whose pieces come behind these where they waited equally long.
            first: Names of those that do not wait for their turn.
        """
        waiting = dict(pieces)
        for part in parts:
            new = part.pieces()
            waiting |= new
            if part.is_new:
                self.sent = {
                    name: at for name, at in self.sent.items() if not name.startswith(f"{part.name}/")
                }
        last = {name: AT_ONCE if name in first else self.sent.get(name, NEVER) for name in waiting}
        for name in sorted(waiting, key=lambda name: last[name]):
            size = size_of(waiting[name])
            if self.taken and size > self._room:
                self.is_full = True
                return
            self._room -= size
            self.sent[name] = self._version
            self.taken.append(name)


def size_of(piece: Any) -> int:
    """Returns how many bytes a piece takes on its way."""
    return len(to_json_plotly(piece))


def stamp_of(piece: Any) -> str:
    """Returns what tells a piece from another."""
    return hashlib.sha1(to_json_plotly(piece).encode(), usedforsecurity=False).hexdigest()[:12]
