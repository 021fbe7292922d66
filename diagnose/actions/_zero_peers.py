"""How ranks that keep a share each get at one another's, together or at a moment that suits only one."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread, main_thread
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

POLL_S = 0.1
"""So often a rank looks whether another one asks: a checkpoint waits so long, and the store of a thousand
ranks is asked ten thousand times a second."""

ANSWER_S = 300.0
"""A rank that is asked answers between two of its steps, and the longest steps compile."""

TOGETHER_S = 300.0
"""All ranks undo a change at the same step, where one of them may still be saving what it has learnt; and
one whose script has ended stays that long for others that have not, and may ask it."""

HASTY_S = 10.0
"""Likewise while an exception is handled: of the script's the others learn when this rank ends."""

FOREVER = timedelta(days=1)
"""Ranks wait for each other before a step as they do in the backward pass, however long one of them saves
or evaluates. A rank that dies closes its connections, and nobody waits."""

TAG = 7

Share = list[tuple[int, dict[str, Any]]]
"""States of parameters, by their place in the optimizer."""

_made = itertools.count()


class Peers:
    """The ranks of a job, joined by a gloo group that the script does not know. Made on all at once.

    Args:
        shown: Returns this rank's share as it was after so many steps; `None` if it has not come that far.
            Called in another thread, and what it returns is not changed as long as the rank that asks for
            it does not meet the others.
    """

    def __init__(self, shown: Callable[[int], Share | None]) -> None:
        self.rank, self.num = distributed.get_rank(), distributed.get_world_size()
        self._shown = shown
        self._rounds = itertools.count()
        self._closed = Event()
        self._failed_before = id(getattr(sys, "last_value", None))
        store: Any = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"diagnose zero {next(_made)}", store)
        self._group: Any = distributed.ProcessGroupGloo(self._store, self.rank, self.num, FOREVER)
        # Never destroyed: see `launch.ranks`.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answers the other ranks while open."""
        thread = Thread(target=self._serve, name="diagnose-zero", daemon=True)
        thread.start()
        try:
            yield
        finally:
            if main_thread().is_alive():  # else the script has ended
                with contextlib.suppress(RuntimeError):
                    self.together("")  # one that is late may ask yet
            self._closed.set()
            thread.join(10 * POLL_S)  # longer it takes only to answer a rank that is gone

    def meet(self) -> None:
        """Waits until all ranks have come here."""
        self._group.barrier().wait()

    def gathered(self, values_N: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's values; called on all at once."""
        received = [torch.empty_like(values_N) for _ in range(self.num)]
        self._group.allgather([received], [values_N]).wait()
        return received

    def together(self, mine: str) -> list[str]:
        """Returns every rank's text, if all ranks come here about now: all get them, or none does.

        Raises:
            RuntimeError: If some rank did not come.
        """
        key = f"together {next(self._rounds)}"
        self._store.set(f"{key} {self.rank}", mine)
        wish = "go" if self._all_come() and not self._store.add("ended", 0) else "stop"
        if self._store.compare_set(f"{key} end", "", wish) != b"go":
            raise RuntimeError("some rank has ended, or did not come in time")
        return [self._store.get(f"{key} {rank}").decode() for rank in range(self.num)]

    def leave(self) -> None:
        """The script has ended. Stays until those of all ranks have, unless it ended by an error."""
        with contextlib.suppress(RuntimeError):  # the store has gone with its rank
            self._store.add("ended", 1)
            if id(getattr(sys, "last_value", None)) == self._failed_before:
                self._all_come()

    def _all_come(self) -> bool:
        """Whether all ranks come here; `False` at once if one of them dies."""
        deadline = time.monotonic() + (TOGETHER_S if sys.exc_info()[0] is None else HASTY_S)
        try:
            work = self._group.barrier()
            while not work.is_completed():
                if time.monotonic() > deadline:
                    return False  # one that comes later finds that this rank has been here
                time.sleep(POLL_S / 100)
            work.wait()
        except RuntimeError:
            return False
        return True

    # -- asking, and being asked

    def ask(self, steps: int) -> Share:
        """Returns the shares of all other ranks after so many steps, on the CPU. They need not ask too.

        Raises:
            RuntimeError: If one does not answer.
        """
        others = [rank for rank in range(self.num) if rank != self.rank]
        for other in others:
            place = self._store.add(f"asked {other}", 1)
            self._store.set(f"asked {other} {place}", json.dumps([self.rank, steps]))
        return [each for other in others for each in self._received_from(other)]

    def _received_from(self, other: int) -> Share:
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._receive(size, other)
        text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._receive(text, other)
        share = made(text.numpy().tobytes().decode(), torch.device("cpu"))
        for tensor in tensors(share):
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self._receive(values, other)
            tensor.copy_(values)
        return share

    def _receive(self, into: torch.Tensor, other: int) -> None:
        if into.numel():
            self._group.recv([into], other, TAG).wait(timedelta(seconds=ANSWER_S))

    def _serve(self) -> None:
        place = 1
        try:
            while not self._closed.wait(POLL_S):
                key = f"asked {self.rank} {place}"
                if self._store.check([key]):
                    asker, steps = json.loads(self._store.get(key))
                    self._store.delete_key(key)
                    place += 1
                    self._answer(asker, steps)
        except RuntimeError:  # the store, or who asked, is gone: the job has ended
            return

    def _answer(self, asker: int, steps: int) -> None:
        while (share := self._shown(steps)) is None:
            if self._closed.wait(0.001):
                return
        text = torch.frombuffer(bytearray(described(share), "ascii"), dtype=torch.uint8)
        size = torch.tensor([text.numel()], dtype=torch.int64, device="cpu")
        for tensor in (size, text, *tensors(share)):
            if tensor.numel():
                self._group.send([tensor.contiguous()], asker, TAG).wait()


def described(share: Share) -> str:
    """Returns a share as text, without the values of its larger tensors. Numbers stay what they are to the
    bit: JSON has all digits of a float."""
    return json.dumps(
        [[place, {name: _described(each) for name, each in state.items()}] for place, state in share]
    )


def made(text: str, device: torch.device) -> Share:
    """Returns what `described` got, its larger tensors with room for their values only."""
    return [
        (place, {name: _made_from(each, device) for name, each in state.items()})
        for place, state in json.loads(text)
    ]


def tensors(share: Share) -> Sequence[torch.Tensor]:
    """Returns the larger tensors of a share, in order."""
    return [
        each
        for _, state in share
        for each in state.values()
        if isinstance(each, torch.Tensor) and not _is_counter(each)
    ]


def _is_counter(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    if _is_counter(value):
        return {"counter": value.item(), "dtype": dtype}
    return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}


def _made_from(record: dict[str, Any], device: torch.device) -> Any:
    if "value" in record:
        return record["value"]
    dtype: torch.dtype = getattr(torch, record["dtype"])
    if "counter" in record:
        return torch.tensor(record["counter"], dtype=dtype, device="cpu")
    return torch.empty_strided(record["shape"], record["stride"], dtype=dtype, device=device)
