"""Lists of gradients that are clipped, and the tables through which kernels measure and scale them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

import torch
from diagnose.kernels._device import FAILURES, why_none
from diagnose.kernels._layout import disjoint, fits
from diagnose.kernels._likeness import Likeness
from diagnose.kernels._structs import PAIRS, Group, Row
from diagnose.kernels._table import TORCH_EPSILON, Table

from diagnose.hooks._signals import from_signal_handler

TABLES = 8
"""So many lists are remembered, and streams of each: a script clips one, a GAN two."""

FORGOTTEN_AFTER = 1_000
"""A list that was not among so many looks may be forgotten for a new one; until then torch clips that. Of
more lists in turn than are remembered each would be gone when it comes, and to prepare it anew waits for
the device."""

_ANY_PAIR = {grad: pair for (_, grad, _), pair in reversed(PAIRS.items())}
"""One that has gradients of a type; these kernels look at nothing else of it."""

_DTYPE, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")


@dataclass(slots=True, kw_only=True, eq=False)
class Kind:
    """What was looked up of a list of gradients that kernels can read, and holds for each list like it.

    Attributes:
        likeness: Tells these lists.
        place: Where all of them are.
        dtypes: The type of each.
        counts: Its elements.
        are_f32: Whether torch computes their norm in 32 bits, as kernels do.
        tables: By stream.
        disjoint: Addresses at which they were found to share no memory, the last ones.
        seen: When it was looked at last, counted in looks.
    """

    likeness: Likeness
    place: torch.device
    dtypes: list[torch.dtype]
    counts: list[int]
    are_f32: bool
    tables: dict[int, Table]
    disjoint: list[int]
    seen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """A list of gradients that kernels can read.

    Attributes:
        kind: What it is like.
        addresses: Where each lies.
    """

    kind: Kind
    addresses: list[int]


class GradientTables:
    """Tables of rows that have nothing but a gradient.

    A table belongs to one stream, since what is queued on another may run at the same time; and one thread
    at a time uses them, since a launch is made in several steps.

    Attributes:
        broken: Where they have failed, and why, in words.
    """

    def __init__(self) -> None:
        self._kinds: list[Kind] = []
        self._looks = 0
        self._lock = threading.Lock()
        self.broken: dict[torch.device, str] = {}

    def clear(self) -> None:
        """Forgets all of them, and where there could be none."""
        with self._lock:
            self._kinds.clear()
            self.broken.clear()

    def look_at(self, grads: Sequence[torch.Tensor]) -> Gradients | None:
        """Looks at gradients, in each step anew: what changes them need not be seen elsewhere.

        Returns:
            `None` for those that torch has to clip: of another type than tensors of real numbers of 16 or
            32 bits, on several devices or one without kernels, sharing memory or with gaps, to be
            differentiated, all without elements, or more lists in turn than are remembered.
        """
        with self._lock:
            self._looks += 1
            kind = next((each for each in self._kinds if each.likeness.of(grads)), None)
            if kind is None and self._has_room() and can_be_read(grads):
                kind = self._new_kind(grads)
            if kind is None or why_none(kind.place):
                return None
            if kind is not self._kinds[-1]:
                self._kinds.remove(kind)
                self._kinds.append(kind)
            kind.seen = self._looks
        addresses = list(map(torch.Tensor.data_ptr, grads))
        if addresses != kind.disjoint:
            if len(set(addresses)) != len(addresses) and not disjoint(grads):
                return None
            kind.disjoint = addresses
        return Gradients(kind=kind, addresses=addresses)

    def _has_room(self) -> bool:
        """Whether one more list can be remembered; the first of them was not looked at for longest."""
        return len(self._kinds) < TABLES or self._looks - self._kinds[0].seen > FORGOTTEN_AFTER

    def _new_kind(self, grads: Sequence[torch.Tensor]) -> Kind:
        """Of a list that was not seen before. One that has the same rows has the same tables."""
        dtypes = list(map(_DTYPE, grads))
        kind = Kind(
            likeness=Likeness(grads),
            place=grads[0].device,
            dtypes=dtypes,
            counts=list(map(torch.Tensor.numel, grads)),
            are_f32=set(dtypes) == {torch.float32},
            tables={},
            disjoint=[],
        )
        for other in self._kinds:
            if (other.place, other.dtypes, other.counts) == (kind.place, kind.dtypes, kind.counts):
                kind.tables = other.tables
        self._kinds.append(kind)
        del self._kinds[:-TABLES]
        return kind

    def measure(
        self,
        grads: Gradients,
        *,
        max_norm: float,
        grad_scale: torch.Tensor | None = None,
        epsilon: float = TORCH_EPSILON,
    ) -> torch.Tensor | None:
        """Launches `norm`.

        Returns:
            What it writes, four numbers: norm, factor that clips to `max_norm`, whether one is not finite.
            `None` where it cannot be launched, and nothing was.
        """
        place, written = grads.kind.place, None
        with self._lock, self._or_torch(place):
            table = self._table(grads.kind)
            if table is not None:
                outcome_4 = torch.empty(4, dtype=torch.float32, device=place)
                table.point_to(grads.addresses)
                table.run(
                    "norm",
                    "gradient_norm",
                    grad_scale=None if grad_scale is None else grad_scale.to(place, non_blocking=True),
                    outcome_4=outcome_4,
                    max_norm=max_norm,
                    clip_epsilon=epsilon,
                )
                written = outcome_4
        return written

    def scale(self, grads: Gradients, coef: torch.Tensor) -> bool:
        """Multiplies gradients by `coef` in memory.

        Returns:
            Whether it did: not where that cannot be launched.
        """
        done = False
        with self._lock, self._or_torch(grads.kind.place):
            table = self._table(grads.kind)
            if table is not None:
                table.point_to(grads.addresses)
                table.run("scale", "scale", clip_coef=coef)
                done = True
        return done

    @contextmanager
    def _or_torch(self, place: torch.device) -> Iterator[None]:
        """Where something of ours fails inside, all gradients there are torch's from now on."""
        try:
            yield
        except FAILURES as error:
            if from_signal_handler(error.__traceback__):
                raise  # the script's own
            self.broken[place] = str(error)
            warnings.warn(
                f"kernels: {error}\nTorch goes on clipping gradients.", RuntimeWarning, stacklevel=4
            )

    def _table(self, kind: Kind) -> Table | None:
        """The table of this list on the current stream, made if need be and possible."""
        place, tables = kind.place, kind.tables
        stream, captures = _stream_at(place)
        if place in self.broken:
            return None
        table = tables.pop(stream, None)
        if table is None and captures:
            # None can be made now: that would wait. One of another stream becomes the graph's own, since
            # its replays may come at any time; that stream gets another.
            if not tables:
                return None
            table = tables.pop(next(iter(tables)))
        if table is None:
            rows = [
                Row(count=count, pair=_ANY_PAIR[dtype])
                for count, dtype in zip(kind.counts, kind.dtypes, strict=True)
            ]
            table = Table(place, rows, [Group()])
            table.prepare("norm", "gradient_norm")
            table.prepare("scale", "scale")
        tables[stream] = table
        if len(tables) > TABLES:
            del tables[next(iter(tables))]
        return table


def can_be_read(grads: Sequence[torch.Tensor]) -> bool:
    """Whether kernels can read gradients, if they share no memory."""
    if not grads or set(map(type, grads)) != {torch.Tensor}:
        return False
    return (
        set(map(_DTYPE, grads)) <= set(_ANY_PAIR)
        and len(set(map(torch.Tensor.get_device, grads))) == 1
        and not any(map(_REQUIRES_GRAD, grads))
        and any(map(torch.Tensor.numel, grads))  # nothing would be launched
        and not why_none(grads[0].device)
        and all(fits([grad]) for grad in grads)
    )


def _stream_at(place: torch.device) -> tuple[int, bool]:
    """The stream that is current on a device, and whether a CUDA graph is captured on it."""
    if place.type != "cuda":
        return 0, False
    return torch.cuda.current_stream(place).cuda_stream, torch.cuda.is_current_stream_capturing()
