"""The ranks of a job, as the tuner asks them: a group of our own beside the script's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from diagnose.hooks.base import around, replaced_in
from diagnose.tuner.agreement import RanksLost

PATIENCE_S = 30.0
"""A rank that comes this much later than another is not waited for. Tests set `DIAGNOSE_RANKS_WAIT_S`."""

DEAR = 10
"""Times longer it may take where each rank has done something long of its own, such as compiling; and where
an epoch begins, as one rank may have evaluated or saved while the others go on."""

LONGEST = 3
"""A rank is waited for so many times as long as one has been before: what it does, it does again."""

COMMIT_S = 5.0
"""Once all have come, they are within a millisecond of each other."""

FRAME_BYTES = 2048
"""What is exchanged at once: longer values take a second round."""

NAPS_S = (0.00005, 0.0002, 0.001)
"""Pauses between looks whether an exchange has ended: waiting inside of gloo would hold up Ctrl-C."""

NAP_S = 1.0
"""Likewise, of waiting inside of the store."""


class GlooRanks:
    """The processes that make a process group together; this one alone until they have.

    Values travel through a gloo group that torch knows nothing of, made when the script makes its own: all
    ranks are there then. A rank that dies closes its connections, so that the others learn of it at once.
    After each exchange the ranks commit to it through the script's key-value store: it has happened on all
    of them or on none, also where one of them has just given up waiting.

    Args:
        steps: Returns how many steps have ended here; ranks at different steps must not decide together.
        ends: Called before the script destroys its group: what is in force is undone while that is there.

    Attributes:
        rank: See `Ranks`; and `num`.
        interrupted: Not empty once Ctrl-C was pressed: then nobody is waited for.
        an_epoch_begins: Whether a rank may have done something long that is no part of a step.
    """

    def __init__(self, steps: Callable[[], int], ends: Callable[[], None]) -> None:
        self.rank = 0
        self.num = 1
        self.interrupted: Sequence[object] = ()
        self.an_epoch_begins = False
        self._steps = steps
        self._ends = ends
        self._patience_s = float(os.environ.get("DIAGNOSE_RANKS_WAIT_S") or PATIENCE_S)
        self._longest_s = {False: 0.0, True: 0.0}
        self._group: Any = None
        self._store: Any = None
        self._round = 0
        self._lost = ""
        self._hooks = ExitStack()

    # -- the script's process group

    def install(self) -> None:
        """From now on, joins the group that the script makes, and leaves it when the script does."""
        from torch import distributed

        if not distributed.is_available():
            return
        owners = (distributed.distributed_c10d, distributed)
        for name, wrap in (
            ("init_process_group", functools.partial(around, after=self._joined)),
            ("destroy_process_group", functools.partial(around, before=self._destroys)),
        ):
            self._hooks.enter_context(replaced_in(owners, name, wrap))
        if distributed.is_initialized():
            self._lost = "the process group was there before diagnose was"
            self.rank, self.num = distributed.get_rank(), distributed.get_world_size()

    def close(self) -> None:
        """Takes no notice of process groups any more."""
        self._hooks.close()

    def _joined(self, args: tuple[Any, ...], result: None) -> None:
        from torch import distributed

        if not distributed.is_initialized() or self.num > 1 or distributed.get_world_size() == 1:
            return
        self.rank, self.num = distributed.get_rank(), distributed.get_world_size()
        try:
            store = distributed.distributed_c10d._get_default_store()
            self._store = distributed.distributed_c10d.PrefixStore("diagnose", store)
            self._commit(self._patience_s)
            self._group = distributed.ProcessGroupGloo(
                self._store, self.rank, self.num, timedelta(seconds=self._patience_s)
            )
        except RanksLost:
            self._lost = f"not every rank came within {self._patience_s:.0f} s; do all run under diagnose?"
            return
        except (AttributeError, RuntimeError) as error:
            self._lost = f"no group could be made: {_first_line(error)}"
            return
        # Never destroyed: its destructor waits for what is under way, when the script has long ended, and
        # in a forked child for threads that are not there.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _destroys(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._group is not None and not any(args) and not any(kwargs.values()):  # the group of them all
            self._ends()

    # -- see `Ranks`

    def exchange(self, about: str, value: Any, *, dear: bool = False) -> list[Any]:
        if self.num == 1:
            return [value]
        if self._lost:
            raise RanksLost(self._lost)
        self._round += 1
        mine = {"about": about, "step": self._steps(), "value": value}
        dear, begun = dear or self.an_epoch_begins, time.monotonic()
        try:
            told = [json.loads(text) for text in self._gathered(mine, self.patience_s(dear))]
            self._longest_s[dear] = max(self._longest_s[dear], time.monotonic() - begun)
            self._compare(mine, told)
            self._commit(COMMIT_S)
        except RanksLost as lost:
            self._lost = str(lost)
            raise
        except (RuntimeError, ValueError) as error:  # as gloo and the store raise them
            self._lost = f"the ranks did not meet for {about}: {_first_line(error)}"
            raise RanksLost(self._lost) from error
        return [each["value"] for each in told]

    def patience_s(self, dear: bool) -> float:
        """Returns how many seconds the others are waited for."""
        return max(self._patience_s * (DEAR if dear else 1), LONGEST * self._longest_s[dear])

    def leave(self, reason: str) -> None:
        if self._group is not None and not self._lost:
            with contextlib.suppress(RuntimeError):  # then the others find closed connections
                self._send(_frame(json.dumps({"left": reason}).encode()), self._patience_s)
        self._lost = self._lost or reason

    # -- how

    def _compare(self, mine: dict[str, Any], told: list[dict[str, Any]]) -> None:
        for rank, theirs in enumerate(told):
            if "left" in theirs:
                raise RanksLost(f"rank {rank} takes no part any more: {theirs['left']}")
            for what, words in (("step", "at step "), ("about", "at ")):
                if theirs[what] != mine[what]:
                    ours = f"when rank {self.rank} was {words}{mine[what]}"
                    raise RanksLost(f"rank {rank} was {words}{theirs[what]} {ours}")

    def _gathered(self, value: Any, patience_s: float) -> list[bytes]:
        """Every rank's value as it was sent. A second round for those that are longer than a frame."""
        text = json.dumps(value).encode()
        frames = self._wait(*self._send(_frame(text), patience_s))
        longest = max(_length(frame) for frame in frames)
        if longest > FRAME_BYTES - 8:
            frames = self._wait(*self._send(_frame(text, longest + 8), patience_s))
        return [frame[8 : 8 + _length(frame)] for frame in frames]

    def _send(self, frame: bytes, patience_s: float) -> tuple[Any, list[Any]]:
        import numpy as np
        import torch
        from torch.distributed import distributed_c10d

        # By way of NumPy: a script may have set a device on which torch makes its tensors.
        sent = torch.from_numpy(np.frombuffer(bytearray(frame), np.uint8))
        received = [torch.empty_like(sent) for _ in range(self.num)]
        options = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=patience_s)
        return self._group.allgather([received], [sent], options), received

    def _wait(self, work: Any, received: list[Any]) -> list[bytes]:
        looks = 0
        while not work.is_completed():
            if self.interrupted:
                raise RanksLost("it was interrupted")
            time.sleep(NAPS_S[min(looks // 20, len(NAPS_S) - 1)])
            looks += 1
        work.wait()
        return [tensor.numpy().tobytes() for tensor in received]

    def _commit(self, patience_s: float) -> None:
        """All ranks have come this far: the last to say so decides that it counts, if none has given up."""
        key, wish = str(self._round), "go"
        if self._store.add(f"{key}/here", 1) < self.num:
            if not self._comes(f"{key}/end", patience_s):
                wish = "stop"
        elif self._round > 1:
            self._forget(str(self._round - 1))
        if self._store.compare_set(f"{key}/end", "", wish) != b"go":
            raise RanksLost("a rank gave up waiting for the others")

    def _comes(self, key: str, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                self._store.wait([key], timedelta(seconds=max(min(left_s, NAP_S), 0.001)))
            except RuntimeError:
                if left_s <= NAP_S:
                    return False
            else:
                return True

    def _forget(self, key: str) -> None:
        for name in ("here", "end"):
            self._store.delete_key(f"{key}/{name}")


def _frame(text: bytes, size: int = FRAME_BYTES) -> bytes:
    """The text behind its length, cut off or filled up to a size that all ranks know."""
    return (len(text).to_bytes(8, "little") + text)[:size].ljust(size, b"\0")


def _length(frame: bytes) -> int:
    return int.from_bytes(frame[:8], "little")


def _first_line(error: Exception) -> str:
    """What it says, without the place in gloo's source that said it."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[[^]]*\] ", "", line)
