"""What workers say of the samples and batches they make: whether they came before, and their size."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import diagnose
from diagnose.hooks._checksum import MAX_PART_BYTES, MAX_PARTS, checksum
from diagnose.hooks._worker_files import writes_only
from diagnose.hooks._worker_readings import (
    MAX_PIECES,
    CpuDelay,
    Sightings,
    bytes_of,
    pieces_of,
    piped_bytes_of,
)
from tests.with_workers import Notes, Rows, train, workers_of

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone"),
]


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_samples_that_come_out_the_same_each_epoch_are_told_from_random_ones(tmp_path, persistent, random):
    class Augmented(Rows):
        def __getitem__(self, index: int) -> Any:
            noise = torch.rand(2) if random else torch.zeros(2)
            return {"rows": torch.full((2,), float(index)) + noise, "label": index, "name": "a"}

    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample["rows"] for sample in samples])

    loader = DataLoader(
        Augmented(40),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        collate_fn=collate,
        persistent_workers=persistent,
    )
    diagnose.attach(tmp_path / "run")
    for _ in range(3):
        train(loader, 0.1 if persistent else 0.0)  # a persistent worker's last half second is not sent
    workers = workers_of(diagnose.detach())
    assert (workers.repeated, workers.varied) == ((0, 4) if random else (4, 0))


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_first_samples_of_a_stream_are_watched_in_each_worker(tmp_path, persistent, random):
    class Lines(IterableDataset[Any]):
        def __iter__(self) -> Any:
            info = get_worker_info()
            assert info is not None
            for row in range(info.id, 40, info.num_workers):
                yield torch.rand(2) if random else torch.full((2,), float(row))

    loader = DataLoader(Lines(), batch_size=4, num_workers=2, persistent_workers=persistent)
    diagnose.attach(tmp_path / "run")
    for _ in range(3):
        train(loader, 0.1 if persistent else 0.0)
    workers = workers_of(diagnose.detach())
    assert (workers.repeated, workers.varied) == ((0, 8) if random else (8, 0))


class Picture:
    """Like an image of Pillow's: its pixels are behind an attribute that nobody can look into."""

    mode, size = "L", (2, 2)

    def __init__(self, pixels: bytes) -> None:
        self.pixels, self.im = pixels, object()

    def tobytes(self) -> bytes:
        return self.pixels


class Node:
    """Holds private attributes in slots, one of which may be missing."""

    __slots__ = ("__rows", "missing", "owner")

    def __init__(self, rows: torch.Tensor, owner: type = Picture) -> None:
        self.__rows, self.owner = rows, owner


class Store(dict[str, Any]):
    """Like the storage of a graph, which points back to it."""


@dataclass
class Graph:
    store: Store
    path: Path = Path("a.txt")
    kind: Any = float
    log: Any = print


@pytest.mark.parametrize(
    "make",
    [
        lambda value: Graph(Store(x=torch.full((3,), value), name="a")),
        lambda value: {"graph": (SimpleNamespace(x=value), 1)},
        lambda value: (Picture(bytes([int(value)])), None),
        lambda value: [Node(torch.tensor(value)), Path("a")],
        lambda value: Path(f"{value}.png"),
    ],
)
def test_a_sample_that_is_an_object_is_what_it_holds(make: Callable[[float], Any]):
    assert checksum(make(1.0)) == checksum(make(1.0)) is not None
    assert checksum(make(1.0)) != checksum(make(2.0))


class Tagged(set[int]):
    """Keeps members beside its attributes."""

    def __init__(self) -> None:
        super().__init__([1])
        self.tag = "a"


@pytest.mark.parametrize("opaque", [object(), Tagged(), Random(1), SimpleNamespace(), torch.float32])
def test_of_what_cannot_be_seen_whole_nobody_says_that_it_came_again(opaque: Any):
    assert checksum(opaque) is None
    assert checksum((torch.zeros(2), SimpleNamespace(x=opaque))) is None


def test_a_checksum_is_of_the_first_bytes_and_of_what_the_host_can_read():
    long = torch.zeros(2 * MAX_PART_BYTES, dtype=torch.uint8)
    changed = long.clone()
    changed[-1] = 1
    assert checksum(long) == checksum(changed) is not None, "so far nobody looks"
    assert checksum(torch.ones(2, 3).T) == checksum(torch.ones(3, 2))
    assert checksum(torch.zeros(2, dtype=torch.bfloat16)) is None
    assert checksum(torch.zeros(2, device="meta")) is None


def test_a_sample_is_left_as_it_is():
    rows = torch.zeros(4)
    assert checksum((rows, rows[:2])) is not None
    assert len(rows.resize_(100)) == 100


def test_a_picture_that_is_opened_only_is_not_decoded():
    class Undecoded(Picture):
        tile = ("raw",)

        def tobytes(self) -> bytes:
            raise AssertionError("it is decoded")

    assert checksum(Undecoded(b"")) is None


class Endless(Sequence[int]):
    """A sample of more parts than anybody has the time to look at."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        assert index <= MAX_PARTS
        return index


@pytest.mark.parametrize("long", [Endless(), [[0] * 200] * 200, dict.fromkeys(range(MAX_PARTS))])
def test_a_sample_of_very_many_parts_is_not_summed_up(long: Any):
    assert checksum(long) is None
    assert checksum([0] * (MAX_PARTS // 2)) is not None


class Frames(Sequence[Any]):
    """A sample of pictures, each of which is decoded when it is asked for."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("it is decoded")


class Loaded:
    """An object that finds out its size, and all else, when it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is loaded")

    @property
    def shape(self) -> Any:
        raise AssertionError("it is loaded")

    nbytes = detach = shape


@pytest.mark.parametrize("kind", [Frames, Loaded])
def test_nothing_is_loaded_to_look_at_a_sample(kind: Callable[[], Any]):
    sample = kind()
    assert checksum(sample) is None
    assert pieces_of(sample) == 1
    assert bytes_of(sample) in (0, None)
    assert piped_bytes_of(sample) == 0


class Strided(torch.Tensor):
    """Counts the numbers that are copied to have them side by side."""

    copied = 0

    def reshape(self, *shape: Any) -> Any:
        Strided.copied = self.numel()
        return self.as_subclass(torch.Tensor).reshape(*shape)


def test_of_a_large_tensor_only_the_first_rows_are_put_side_by_side():
    rows = torch.zeros(2000, 4000, dtype=torch.uint8).T.as_subclass(Strided)
    assert checksum(rows) is not None
    assert MAX_PART_BYTES <= Strided.copied < 2 * MAX_PART_BYTES


class Endlessly(Rows):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_data_set_that_does_not_know_its_length_or_is_asked_for_other_things_is_not_watched():
    unknown, known = Sightings(Endlessly(4)), Sightings(Rows(4))
    unknown.asked([0, 1])
    known.asked([[0, 1], {"row": 1}])
    unknown.fetched([1.0, 2.0])
    known.fetched([1.0, 2.0])
    assert unknown.seen == known.seen == []


def test_a_worker_waits_for_a_cpu_no_longer_than_it_was_off_it(monkeypatch: pytest.MonkeyPatch):
    delay, told = CpuDelay(), iter([1000, 6000, 6000, 7000])
    monkeypatch.setattr(delay, "_now_ns", lambda: next(told))
    for most_ns in (2000, 3000):
        delay.begins()
        delay.ends(most_ns)
    assert delay.total_ns == 2000 + 1000


def test_files_that_are_opened_to_be_written_are_not_read():
    path, flags = "a.txt", os.O_CLOEXEC
    assert writes_only((path, "w", flags | os.O_WRONLY | os.O_CREAT))
    assert not writes_only((path, "r", flags | os.O_RDONLY))
    assert not writes_only((path, "r+", flags | os.O_RDWR))
    assert not writes_only((path,))


@pytest.mark.parametrize(("num_texts", "pieces"), [(0, 1 + 1 + 1), (10, 1 + 1 + 1 + 10 * (1 + 2))])
def test_the_objects_that_a_batch_consists_of_are_counted(tmp_path, num_texts, pieces):
    diagnose.attach(tmp_path)
    train(rows for rows, _ in DataLoader(Notes(num_texts), batch_size=2, num_workers=1))
    assert workers_of(diagnose.detach()).pieces == pieces


def test_counting_objects_ends_in_what_holds_itself_or_nothing():
    holder: list[Any] = []
    holder.extend([holder] * 50)
    assert pieces_of(holder) == pieces_of([[[]] * 1000] * 1000) == MAX_PIECES
    assert pieces_of(torch.zeros(2)) == pieces_of("text") == pieces_of(None) == 1


def test_bytes_of_a_batch_are_those_of_its_tensors_texts_and_numbers():
    batch = {"rows": torch.zeros(4, 2), "names": ["a", "bc"], "scale": 0.5}
    assert bytes_of(batch) == 4 * 2 * 4 + 1 + 2 + 8
    assert bytes_of([batch, torch.eye(3).to_sparse()]) is None, "it does not say"
    assert bytes_of([0] * 2 * MAX_PIECES) is None, "too many to count"
