"""What the training thread does for the batches that it loads itself."""

from __future__ import annotations

import ast
import gc
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import diagnose
from diagnose.analysis.reading import lines_that_read, reading_shares
from diagnose.hooks.repeated_samples import MAX_DATASETS, TIMES
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame
from tests.fakes import FakeClock, measured

SOURCE = """
import numpy as np
from PIL import Image
import torch as t

def get(path):
    with open(path, "rb") as file:
        raw = file.read()
        tile = parsed(raw)
    wave = np.load(path)
    state = t.load(path)
    text = path.read_text()
    image = Image.open(path).convert("RGB")
    with open(path, "w") as file:
        file.write(text)
    table = json.load(path)
    return augmented(tile, wave)
"""
SECOND = 1_000_000_000
HOOKS = ("dataloader", "loader-facts", "repeated-samples")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells on Linux alone")


# -- lines that read


def test_lines_read_that_open_a_file_or_work_on_one_while_it_is_open():
    assert lines_that_read(ast.parse(SOURCE)).reading == {7, 8, 9, 10, 11, 12}, (
        "no picture, no writing, no parsing"
    )


def test_a_file_that_cannot_be_parsed_has_no_such_lines():
    assert lines_that_read(None).reading == frozenset()


def test_the_reading_share_is_of_the_whole_sampled_time():
    def stack(line: int) -> tuple[Frame, ...]:
        return ("", 0, ""), ("/home/u/data.py", line, "get"), ("/home/u/train.py", 3, "main")

    sources = Sources({"/home/u/data.py": SOURCE})
    shares = [(stack(7), 2.0 * SECOND), (stack(8), SECOND), (stack(17), SECOND)]
    assert reading_shares(shares, sources).reading == 0.75
    assert reading_shares([(stack(7), 1e6)], sources).reading is None, "too few samples"


# -- samples that come again


class Rows(Dataset[Any]):
    """Rows of numbers; those drawn from a generator differ each time."""

    def __init__(
        self, *, random: torch.Generator | None = None, broken: int = -1, opaque: bool = False
    ) -> None:
        self.random, self.broken, self.opaque = random, broken, opaque

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise KeyError(index)
        constant = torch.full((4,), float(index))
        row = constant if self.random is None else torch.rand(4, generator=self.random)
        return (row, object()) if self.opaque else row


def stacked(rows: list[Any]) -> Any:
    return torch.stack(rows) if isinstance(rows[0], torch.Tensor) else rows


def sightings(dataset: Dataset[Any], epochs: int, **loader: Any) -> list[list[int]]:
    with measured(FakeClock(), *HOOKS) as recorder:
        batches = DataLoader(dataset, batch_size=4, collate_fn=stacked, **loader)
        for _ in range(epochs):
            for _ in batches:
                pass
        assert not recorder.notes
        seen: list[list[int]] = recorder.facts.get("own_sightings", [])
        return seen


def test_samples_of_the_first_batch_are_seen_again_in_later_epochs_in_whatever_order():
    seen = sightings(Rows(), 6, shuffle=True)
    by_index = {index: [s for _, i, s in seen if i == index] for _, index, _ in seen}
    assert len(by_index) == 4
    assert {len(sums) for sums in by_index.values()} == {TIMES}, "then they are known"
    assert all(len(set(sums)) == 1 for sums in by_index.values())


def test_samples_that_are_drawn_anew_come_out_differently():
    seen = sightings(Rows(random=torch.Generator()), 2)
    assert len(seen) == 8 and len({sum_ for _, _, sum_ in seen}) == 8


class SeldomAugmented(Rows):
    """An augmentation that has not struck yet, whoever waits for it."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return -super().__getitem__(index) if self.draw() < 0 else super().__getitem__(index)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random, lambda: np.random.rand()])
def test_of_samples_that_draw_random_numbers_nobody_says_that_they_come_out_the_same(draw):
    assert sightings(SeldomAugmented(draw), 3) == []


class Growing(Rows):
    """Hands out one tensor, which it makes larger for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.zeros(1)

    def __getitem__(self, index: int) -> Any:
        return self.held.resize_(index + 1)


def test_a_tensor_whose_storage_grows_may_go_on_to_do_so():
    assert len(sightings(Growing(), 2)) == 8


def test_loaders_of_other_datasets_on_the_same_line_are_not_taken_for_one():
    with measured(FakeClock(), *HOOKS) as recorder:
        for part in range(2):
            rows = Subset(Rows(), range(4 * part, 4 * part + 4))
            loader = DataLoader(rows, batch_size=4, collate_fn=stacked)
            for _ in range(2):
                assert len(list(loader)) == 1
        seen = recorder.facts["own_sightings"]
    assert sorted(index for _, index, _ in seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({(index, sum_) for _, index, sum_ in seen}) == 4, "those of the second dataset alone"


def test_a_dataset_that_is_made_anew_in_each_epoch_is_the_same_if_its_samples_are():
    with measured(FakeClock(), *HOOKS) as recorder:
        for _ in range(TIMES):
            assert len(list(DataLoader(Rows(), batch_size=4, collate_fn=stacked))) == 3
        seen = recorder.facts["own_sightings"]
    assert len(seen) == 4 * TIMES and len({(index, sum_) for _, index, sum_ in seen}) == 4


def test_of_ever_new_datasets_a_few_are_watched():
    with measured(FakeClock(), *HOOKS):
        for shard in range(MAX_DATASETS + 2):
            rows = Subset(Rows(), range(shard, shard + 4))
            batches: Any = iter(DataLoader(rows, batch_size=4, collate_fn=stacked))
            assert ("fetch" in vars(batches._dataset_fetcher)) == (shard < MAX_DATASETS)
            next(batches)


def test_what_its_parent_has_seen_is_no_part_of_a_forked_childs_facts():
    rows = Rows()
    with measured(FakeClock(), *HOOKS) as recorder:
        for _ in range(2):
            assert len(list(DataLoader(rows, batch_size=4, collate_fn=stacked))) == 3
            assert len(recorder.facts["own_sightings"]) == 4
            recorder.reset()


def test_one_epoch_shows_each_sample_once():
    assert len(sightings(Rows(), 1)) == 4


def test_of_samples_that_cannot_be_summed_up_nothing_is_said():
    assert sightings(Rows(opaque=True), 3) == []
    assert sightings(Rows(), 3, num_workers=1) == [], "workers tell themselves"


def test_batches_are_the_same_whether_their_samples_are_watched_or_not():
    torch.manual_seed(3)
    rows = Rows(random=torch.default_generator)
    alone = [row.clone() for _ in range(3) for row in DataLoader(rows, batch_size=4)]
    torch.manual_seed(3)
    with measured(FakeClock(), *HOOKS):
        watched = [row.clone() for _ in range(3) for row in DataLoader(rows, batch_size=4)]
    assert all(map(torch.equal, alone, watched))


def test_a_fetcher_is_left_as_it_was_and_not_kept_alive():
    with measured(FakeClock(), *HOOKS):
        loader = DataLoader(Rows(), batch_size=4, collate_fn=stacked)
        batches: Any = iter(loader)
        fetcher = batches._dataset_fetcher
        assert "fetch" in vars(fetcher)
        next(batches)
        assert "fetch" not in vars(fetcher) and fetcher.collate_fn is stacked
        again: Any = iter(loader)
        other = again._dataset_fetcher
        assert "fetch" in vars(other)
    assert "fetch" not in vars(other), "the hook has left"
    gc.disable()
    try:
        gone = weakref.ref(other)
        del again, other
        assert gone() is None
    finally:
        gc.enable()


def test_a_dataset_that_raises_does_so_and_nothing_stays_in_its_place():
    with measured(FakeClock(), *HOOKS) as recorder:
        batches: Any = iter(DataLoader(Rows(broken=2), batch_size=4, collate_fn=stacked))
        with pytest.raises(KeyError):
            next(batches)
        assert batches._dataset_fetcher.collate_fn is stacked
        assert len(next(batches)) == 4
        assert not recorder.notes


def test_what_another_library_has_put_around_a_fetch_since_stays():
    calls = []
    with measured(FakeClock(), *HOOKS) as recorder:
        batches: Any = iter(DataLoader(Rows(), batch_size=4, collate_fn=stacked))
        fetcher = batches._dataset_fetcher
        ours = fetcher.fetch

        def theirs(indices: list[int]) -> Any:
            calls.append(indices)
            return ours(indices)

        fetcher.fetch = theirs
        assert len(next(batches)) == 4
        assert len(recorder.facts["own_sightings"]) == 4
        assert fetcher.fetch is theirs
    assert fetcher.fetch is theirs and len(next(batches)) == 4
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- what is read


class Pieces(Dataset[Any]):
    """Rows of which each lies in files of its own."""

    def __init__(self, folder: Path, parts: int = 8) -> None:
        self.folder, self.parts = folder, parts
        for part in range(parts):
            (folder / f"{part}.bin").write_bytes(bytes(1000))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        total = index
        for part in range(self.parts):
            with open(self.folder / f"{part}.bin", "rb") as file:
                total += len(file.read())
        return torch.full((4,), float(total))


@on_linux
def test_what_the_training_thread_reads_is_counted_for_some_batches(tmp_path):
    with measured(FakeClock(), "dataloader") as recorder:
        for _ in DataLoader(Pieces(tmp_path), batch_size=4):
            pass
    counters = recorder.feed.counters
    assert counters["collated_samples"] == 4 * counters["collates"] == 64
    assert counters["read_batches"] == 4
    assert 4 * 32 <= counters["reads"] / counters["read_batches"] / 0.5 < 4 * 32 + 8, "a file takes two"
    assert counters["read_bytes"] / counters["read_batches"] == pytest.approx(32_000, rel=0.1)
    assert counters["made_bytes"] == counters["made_batches"] * 4 * 4 * 4 > 0


def test_what_stands_for_the_dataset_in_a_trial_is_not_counted():
    with measured(FakeClock(), *HOOKS) as recorder:
        loader = DataLoader(Rows(), batch_size=4)
        assert len(list(loader)) == 3
        before = dict(recorder.feed.counters)
        assert before["collates"] == 3
        batches: Any = iter(loader)
        batches._dataset_fetcher.dataset = Rows()
        assert len(list(batches)) == 3
    assert recorder.feed.counters == before


@on_linux
def test_a_run_tells_what_its_training_thread_read_and_that_samples_came_again(tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    files = tmp_path / "files"
    files.mkdir()
    diagnose.attach(tmp_path / "run")
    try:
        loader = DataLoader(Pieces(files, parts=32), batch_size=8, shuffle=True)
        for _ in range(12):
            for rows in loader:
                model(rows).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        own = diagnose.detach().input.own
    assert own is not None
    assert own.samples == 8
    assert own.reads is not None and 512 <= own.reads < 600
    assert own.reading_share is not None and own.reading_share > 0.6
    assert (own.repeated, own.varied) == (4, 0)
