"""Lists of gradients that are clipped, and the tables through which kernels measure and scale them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from diagnose.kernels._device import why_none
from diagnose.kernels._layout import disjoint, fits
from diagnose.kernels._structs import PAIRS, Group, Row
from diagnose.kernels._table import TORCH_EPSILON, Table

from diagnose.core.errors import DiagnoseError

TABLES = 8
"""So many lists are remembered: a script clips one, a GAN two, some do it on several streams."""

_ANY_PAIR = {grad: pair for (_, grad, _), pair in reversed(PAIRS.items())}
"""One that has gradients of a type; these kernels look at nothing else of it."""

_DTYPE, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What was looked up of a list of gradients that kernels can read.

    Attributes:
        place: Where all of them are.
        dtypes: The type of each.
        addresses: Where each lies.
        counts: Its elements.
    """

    place: torch.device
    dtypes: list[torch.dtype]
    addresses: list[int]
    counts: tuple[int, ...]

    @property
    def are_f32(self) -> bool:
        """Whether torch computes their norm in 32 bits, as kernels do."""
        return set(self.dtypes) == {torch.float32}


def look_at(grads: Sequence[torch.Tensor]) -> Gradients | None:
    """Looks at gradients, in each step anew: what changes them need not be seen elsewhere.

    Returns:
        `None` for those that torch has to clip: of another type than tensors of real numbers of 16 or 32
        bits, on several devices or one without kernels, sharing memory or with gaps, or to be
        differentiated.
    """
    if not grads or set(map(type, grads)) != {torch.Tensor}:
        return None
    dtypes = list(map(_DTYPE, grads))
    if (
        not set(dtypes) <= set(_ANY_PAIR)
        or len(set(map(torch.Tensor.get_device, grads))) != 1
        or any(map(_REQUIRES_GRAD, grads))
        or why_none(grads[0].device)
    ):
        return None
    if not all(map(torch.Tensor.is_contiguous, grads)) and not all(fits([grad]) for grad in grads):
        return None
    addresses = list(map(torch.Tensor.data_ptr, grads))
    if len(set(addresses)) != len(addresses) and not disjoint(grads):
        return None
    counts = tuple(map(torch.Tensor.numel, grads))
    return Gradients(place=grads[0].device, dtypes=dtypes, addresses=addresses, counts=counts)


class GradientTables:
    """Tables of rows that have nothing but a gradient.

    A table belongs to one stream, since what is queued on another may run at the same time; and one thread
    at a time uses them, since a launch is made in several steps.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[object, int], Table] = {}
        self._lock = threading.Lock()
        self._broken: set[torch.device] = set()

    def clear(self) -> None:
        """Forgets all of them, and where there could be none."""
        with self._lock:
            self._tables.clear()
            self._broken.clear()

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
        with self._lock:
            table = self._table(grads)
            if table is None:
                return None
            outcome_4 = torch.empty(4, dtype=torch.float32, device=grads.place)
            table.point_to(grads.addresses)
            table.run(
                "norm",
                "gradient_norm",
                grad_scale=None if grad_scale is None else grad_scale.to(grads.place, non_blocking=True),
                outcome_4=outcome_4,
                max_norm=max_norm,
                clip_epsilon=epsilon,
            )
            return outcome_4

    def scale(self, grads: Gradients, coef: torch.Tensor) -> bool:
        """Multiplies gradients by `coef` in memory.

        Returns:
            Whether it did: not where that cannot be launched.
        """
        with self._lock:
            table = self._table(grads)
            if table is None:
                return False
            table.point_to(grads.addresses)
            table.run("scale", "scale", clip_coef=coef)
            return True

    def _table(self, grads: Gradients) -> Table | None:
        """The table of this list on the current stream, made if need be and possible."""
        place, list_of = grads.place, (grads.place, grads.counts, tuple(grads.dtypes))
        stream, captures = _stream_at(place)
        if place in self._broken:
            return None
        table = self._tables.pop((list_of, stream), None)
        if table is None and captures:
            # None can be made now: that would wait. One of another stream becomes the graph's own, since
            # its replays may come at any time; that stream gets another.
            found = [key for key in self._tables if key[0] == list_of]
            table = self._tables.pop(found[0]) if found else None
            if table is None:
                return None
        if table is None:
            rows = [
                Row(count=count, pair=_ANY_PAIR[dtype])
                for count, dtype in zip(grads.counts, grads.dtypes, strict=True)
            ]
            table = Table(place, rows, [Group()])
            try:
                table.prepare("norm", "gradient_norm")
                table.prepare("scale", "scale")
            except (OSError, DiagnoseError) as error:
                self._broken.add(place)
                warnings.warn(
                    f"kernels: {error}\nTorch goes on clipping gradients.", RuntimeWarning, stacklevel=2
                )
                return None
        self._tables[list_of, stream] = table
        if len(self._tables) > TABLES:
            del self._tables[next(iter(self._tables))]
        return table


def _stream_at(place: torch.device) -> tuple[int, bool]:
    """The stream that is current on a device, and whether a CUDA graph is captured on it."""
    if place.type != "cuda":
        return 0, False
    return torch.cuda.current_stream(place).cuda_stream, torch.cuda.is_current_stream_capturing()
