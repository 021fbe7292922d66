"""Samples of a dataset, kept in memory and handed out again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from diagnose.actions._careful import in_short
from diagnose.actions._loader_contents import MANY_BYTES
from diagnose.actions._loader_parts import Watch, weakly
from diagnose.actions._loader_purity import same
from diagnose.hooks._drawing import moved, random_states
from diagnose.hooks._signals import from_signal_handler

PLAIN = (str, bytes, int, float, bool, complex, type(None))

OTHER = "the dataset has made another sample of the same index"

COMPARE_SHARE = 0.01
"""While nothing is handed out samples are still compared with the kept ones, in this part of the time: what
a trial measures without the cache must not be our own bookkeeping."""


class Samples:
    """What a dataset made for each index, as long as it would make the same again.

    Args:
        budget_bytes: So much is kept at most; what does not fit is made anew.

    Attributes:
        refused: Why nothing is kept any more; empty while samples are.
        asked: How many samples have been asked for since the first one was kept.
    """

    def __init__(self, dataset: Any, budget_bytes: float) -> None:
        self.refused = ""
        self.asked = 0
        self._dataset = weakly(dataset, self._dropped)
        self._kept: dict[int, Any] = {}  # None for what is made each time: it had no room
        self._made: list[tuple[int, Any, int]] = []
        self._room = budget_bytes
        self._budget = budget_bytes
        self._watch = Watch(dataset, most_bytes=MANY_BYTES)
        self._refuse_unseen()
        self._doubted = False
        self._states: dict[str, int] = {}
        self._took_s = self._due_s = 0.0

    @property
    def are_all_known(self) -> bool:
        """Whether as many samples have been asked for as an epoch has."""
        dataset = self._dataset()
        return dataset is not None and self.asked >= len(dataset)

    def epoch_begins(self) -> None:
        """Forgets everything if the script has changed the dataset, or what it is made of. If not, one
        sample is made again, and compared."""
        if self._watch.has_changed():
            self._forget()
        self._doubted = True

    def _dropped(self) -> None:
        """The script is done with the dataset."""
        self.refuse("the script is done with the dataset")
        self._watch = Watch(None)

    def _forget(self) -> None:
        self._watch.renew()
        self._refuse_unseen()
        self._kept.clear()
        self._made.clear()
        self._room = self._budget
        self.asked = 0

    def _refuse_unseen(self) -> None:
        if self._watch.unseen and not self.refused:
            self.refuse(f"nobody could see whether the script changes {self._watch.unseen}")

    def need_nothing(self, indices: list[Any]) -> bool:
        """Whether the dataset may make these samples unwatched, and counts them then: not where one is new,
        nor where it is time to compare one."""
        if not self.refused:
            try:
                if not all(map(self._kept.__contains__, indices)):
                    return False
            except TypeError:  # an index without a hash is never kept
                return False
            if self._doubted or time.perf_counter() >= self._due_s:
                self._doubted = True
                return False
        self.asked += len(indices)
        return True

    def watch(self) -> None:
        """The dataset is about to make samples, and nothing else runs until `done`."""
        self._made.clear()
        if not self.refused:
            begun_s = time.perf_counter()
            self._states = random_states()
            self._took_s = time.perf_counter() - begun_s

    def keep(self, index: Any, sample: Any) -> None:
        """The dataset has made a sample."""
        if self.refused or type(index) is not int:
            return
        if index in self._kept:
            kept = self._kept[index]
            if kept is None or not self._doubted:
                return
            begun_s, self._doubted = time.perf_counter(), False
            if not same(kept, sample):
                self.refuse(self._drew() or OTHER)
            now_s = time.perf_counter()
            took_s = 2 * self._took_s + now_s - begun_s  # the generators are looked at once more
            self._due_s = now_s + took_s / COMPARE_SHARE
            return
        try:
            self._made.append((index, *copied(sample)))
        except TypeError as error:
            self.refuse(self._drew() or str(error))

    def done(self) -> None:
        """The dataset has made all samples since `watch`: they are kept if it drew no random numbers."""
        if self.refused:
            return
        drew = self._drew()
        if drew:
            self.refuse(drew)
            return
        for index, sample, num_bytes in self._made:
            if index in self._kept:  # asked for twice
                kept = self._kept[index]
                if kept is not None and not same(kept, sample):
                    self.refuse(OTHER)
                    return
                continue
            fits = sample is not None and num_bytes <= self._room
            self._kept[index] = sample if fits else None
            self._room -= num_bytes if fits else 0
        self._made.clear()

    def _drew(self) -> str:
        drew = moved(self._states, random_states())
        return f"making a sample draws random numbers ({', '.join(drew)})" if drew else ""

    def refuse(self, reason: str) -> None:
        """Keeps nothing any more."""
        self.refused = reason
        self._kept.clear()
        self._made.clear()

    def get(self, index: Any) -> Any:
        """Returns what was kept for an index, `None` if nothing was."""
        if self._watch.has_changed_now():
            self._forget()
        self.asked += 1
        return self._kept.get(index) if type(index) is int and not self._doubted else None


class Remembering:
    """Stands for the dataset in the fetcher of one of the script's iterators.

    Args:
        samples: What is kept of it.
        aliasing: Whether what is kept may be handed out itself: torch's own `collate_fn` copies from it.

    Attributes:
        serving: Whether what is kept is handed out.
        is_over: Whether it should have been taken out.
    """

    def __init__(self, dataset: Any, samples: Samples, *, aliasing: bool) -> None:
        self.dataset = dataset
        self.serving = False
        self.is_over = False
        self._samples = samples
        self._aliasing = aliasing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if not self.serving and self._ours(self._samples.need_nothing, [index]):
            return self.dataset[index]
        return self._some([index])[0]

    def __getitems__(self, indices: Any) -> Any:
        """Returns the samples of a batch, as torch's fetcher asks for them; they are watched together."""
        if type(indices) is list and not self.serving and self._ours(self._samples.need_nothing, indices):
            batch = getattr(self.dataset, "__getitems__", None)  # one of torch's own: others are refused
            return batch(indices) if batch else [self.dataset[index] for index in indices]
        return self._some(indices)

    def _some(self, indices: Any) -> list[Any]:
        samples: list[Any] = []
        watched = False
        for index in indices:
            sample = self._ours(self._again, index)
            if sample is None:
                if not watched:
                    self._ours(self._samples.watch)
                    watched = True
                sample = self.dataset[index]
                self._ours(self._samples.keep, index, sample)
            samples.append(sample)
        if watched:
            self._ours(self._samples.done)
        return samples

    def _ours(self, work: Callable[..., Any], *args: Any) -> Any:
        """Does something of ours; where that fails the dataset makes all samples, from this one on."""
        try:
            return work(*args)
        except Exception as error:
            if from_signal_handler(error.__traceback__):
                raise  # the script's own
            self._samples.refuse(f"keeping samples failed: {in_short(error)}")
            return None

    def _again(self, index: Any) -> Any:
        sample = None if self._samples.refused else self._samples.get(index)
        if sample is None or not self.serving:
            return None
        return sample if self._aliasing else copied(sample)[0]


def copied(sample: Any) -> tuple[Any, int]:
    """Returns a copy of a sample that shares no memory with it, and its size.

    Raises:
        TypeError: If it holds something of which a copy may be something else.
    """
    if isinstance(sample, PLAIN):
        return sample, sys.getsizeof(sample)
    if type(sample) is torch.Tensor and sample.device.type == "cpu" and not sample.requires_grad:
        return sample.clone(), sample.numel() * sample.element_size()
    if type(sample).__module__ == "numpy" and hasattr(sample, "nbytes") and not sample.dtype.hasobject:
        return sample.copy(order="K"), int(sample.nbytes)
    if type(sample) is dict:
        parts = {key: copied(value) for key, value in sample.items()}
        return {key: part[0] for key, part in parts.items()}, sum(part[1] for part in parts.values())
    if type(sample) in (list, tuple) or hasattr(sample, "_fields"):
        items = [copied(value) for value in sample]
        make: Callable[..., Any] = (
            type(sample)._make if hasattr(sample, "_fields") else type(sample)  # a named tuple
        )
        return make([item[0] for item in items]), sum(item[1] for item in items)
    raise TypeError(
        f"a sample holds a {type(sample).__qualname__}, of which no copy is known to be as good"
    )
