"""Reads the events of a Chrome trace as torch's profiler writes it, as columns, in bounded memory.

The text is taken in pieces and each event parsed by the interpreter's own scanner, so that neither the
whole text nor the events as objects are ever there at once, and no layout of the lines is relied on.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.core.errors import DiagnoseError

KERNEL, COPY, FILL, CALL, OPERATION, NOTE = range(6)
"""What an event is: a kernel, a copy, a fill of the device; on the host a call of the driver or its
runtime, an operation of torch, or a part of the program that was given a name."""

KIND_OF = {
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": FILL,
    "memset": FILL,
    "cuda_runtime": CALL,
    "cuda_driver": CALL,
    "runtime": CALL,
    "privateuse1_runtime": CALL,
    "cpu_op": OPERATION,
    "operator": OPERATION,
    "user_annotation": NOTE,
}

PIECE = 1 << 22
"""Bytes read at a time: long enough that an event cut in two costs nothing."""

MAX_HEADER = 1 << 24
"""Where no event has begun by then, it is no trace."""

NO_MORE = re.compile(r"[\s,]*")
BEGIN = re.compile(r'"traceEvents"\s*:\s*\[|\A\s*\[')


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """Events that have a duration; each array has one entry per event, in no particular order.

    Attributes:
        start_ns: From the earliest event on. `end_ns`: likewise.
        kind: One of the kinds above.
        name: Index into `names`.
        thread: A number for the host's thread, or the device's stream.
        correlation: The number that a kernel shares with the call that launched it; -1 without one.
        blocks_per_sm: Blocks that a kernel starts for each multiprocessor of its device; NaN where unknown.
        device: Name of the device that most of the kernels ran on; of the first that the trace describes
            where they do not say.
        num_events: Events of all sorts that were read.
        damaged: Whether the file ends in the middle.
    """

    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    name: npt.NDArray[np.int64]
    thread: npt.NDArray[np.int64]
    correlation: npt.NDArray[np.int64]
    blocks_per_sm: npt.NDArray[np.float64]
    names: tuple[str, ...]
    device: str = ""
    num_events: int = 0
    damaged: bool = False

    def until(self, end_ns: int) -> Events:
        """Returns the events that begin before a time."""
        kept = self.start_ns < end_ns
        columns = ("start_ns", "end_ns", "kind", "name", "thread", "correlation", "blocks_per_sm")
        return replace(self, **{name: getattr(self, name)[kept] for name in columns})


def read_events(path: Path) -> Events:
    """Reads a trace, `.json` or `.json.gz`, also one that ends in the middle.

    Raises:
        DiagnoseError: If it is no trace.
        OSError: If it cannot be read.
    """
    start, length, blocks, kinds = array("d"), array("d"), array("d"), array("q")
    name, thread, correlation = array("q"), array("q"), array("q")
    names: dict[str, int] = {}
    threads: dict[tuple[Any, Any], int] = {}
    ran_on: Counter[str] = Counter()
    stream = _Stream(path)
    for event in stream.events():
        if event.get("ph") != "X":
            continue
        kind = KIND_OF.get(str(event.get("cat", "")).lower())
        if kind is None:
            continue
        try:
            begun, took = float(event["ts"]), float(event.get("dur", 0.0))
        except (KeyError, TypeError, ValueError):
            continue
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        number = arguments.get("correlation", -1)
        per_sm = arguments.get("blocks per SM") if kind == KERNEL else None
        if kind == KERNEL:
            ran_on[str(arguments.get("device"))] += 1
        start.append(begun)
        length.append(took)
        blocks.append(per_sm if isinstance(per_sm, (int, float)) else float("nan"))
        kinds.append(kind)
        name.append(names.setdefault(str(event.get("name", "")), len(names)))
        thread.append(threads.setdefault((str(event.get("pid")), str(event.get("tid"))), len(threads)))
        correlation.append(number if isinstance(number, int) and -1 <= number < 1 << 62 else -1)
    start_us = np.frombuffer(start, dtype=np.float64) if start else np.zeros(0)
    length_us = np.frombuffer(length, dtype=np.float64) if length else np.zeros(0)
    good = np.isfinite(start_us) & np.isfinite(length_us) & (length_us >= 0)
    origin_us = start_us[good].min() if good.any() else 0.0
    start_ns = np.rint((start_us[good] - origin_us) * 1000).astype(np.int64)
    return Events(
        start_ns=start_ns,
        end_ns=start_ns + np.rint(length_us[good] * 1000).astype(np.int64),
        kind=_column(kinds)[good],
        name=_column(name)[good],
        thread=_column(thread)[good],
        correlation=_column(correlation)[good],
        blocks_per_sm=np.frombuffer(blocks, dtype=np.float64)[good] if blocks else np.zeros(0),
        names=tuple(names),
        device=stream.device(ran_on),
        num_events=stream.num_events,
        damaged=stream.damaged,
    )


def _column(values: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.int64) if values else np.zeros(0, dtype=np.int64)


class _Stream:
    """The text of one trace, event by event."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._devices: dict[str, str] = {}
        self.num_events = 0
        self.damaged = False

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields each event, and says at the end whether there should have been more."""
        scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
        with _opened(self._path) as file:
            text, at = self._header(file)
            while True:
                found = NO_MORE.match(text, at)
                assert found is not None
                at = found.end()
                if text[at : at + 1] == "]":
                    return
                try:
                    event, at = scan(text, at)
                except (StopIteration, json.JSONDecodeError) as error:
                    more = self._more(file)
                    if not more:
                        self.damaged = True
                        return
                    if len(text) - at > MAX_HEADER:
                        raise DiagnoseError(f"{self._path.name}: no trace: {error}.") from None
                    text, at = text[at:] + more, 0
                    continue
                self.num_events += 1
                if isinstance(event, dict):
                    yield event

    def _header(self, file: BufferedIOBase) -> tuple[str, int]:
        """Returns the first piece of the text, and where in it the events begin."""
        text = ""
        while len(text) < MAX_HEADER:
            more = self._more(file)
            text += more
            begin = BEGIN.search(text)
            if begin is not None:
                self._describe(text[: begin.start()])
                return text, begin.end()
            if not more:
                break
        raise DiagnoseError(f"{self._path.name}: no trace of torch's profiler: it has no events.")

    def _describe(self, header: str) -> None:
        """Takes the devices' names out of what stands before the events."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            properties = json.loads(header.rstrip().rstrip(",") + "}")["deviceProperties"]
            self._devices = {str(each.get("id", 0)): str(each["name"]) for each in properties}

    def device(self, ran_on: Counter[str]) -> str:
        """Returns the name of the device that most ran on."""
        names = [self._devices[number] for number, _ in ran_on.most_common() if number in self._devices]
        return next(iter([*names, *self._devices.values()]), "")

    def _more(self, file: BufferedIOBase) -> str:
        """Returns the next piece of text; none at the end, also where a packed file ends too early."""
        pieces: list[str] = []
        missing = PIECE
        while missing > 0:
            try:
                # Not `read`, which keeps nothing of what it has read when the file ends too early.
                piece = file.read1(missing)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                if not (pieces or self.num_events) and isinstance(error, gzip.BadGzipFile):
                    raise DiagnoseError(f"{self._path.name}: cannot be unpacked: {error}.") from None
                break
            if not piece:
                break
            pieces.append(self._decoder.decode(piece))
            missing -= len(piece)
        return "".join(pieces)


def _opened(path: Path) -> BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
