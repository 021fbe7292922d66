"""Facts of the loaders that feed training: settings, and the lines and calls that made them."""

from __future__ import annotations

import inspect
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import diagnose
from diagnose.core.profile import Profile
from diagnose.hooks import loader_facts

MS = 1_000_000
ROWS = TensorDataset(torch.zeros(48, 4))


def line_of(text: str) -> int:
    """Number of the one line of this file that begins with a text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.strip().startswith(text))
    return number


def train(loader: Any, epochs: int = 1, steps: int | None = None) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for step, (rows,) in enumerate(loader):
            model(rows).sum().backward()
            optimizer.step()
            if step == steps:
                break


def profile_of(run_dir: Path, *loaders: Any, epochs: int = 1) -> Profile:
    diagnose.attach(run_dir)
    try:
        for loader in loaders:
            train(loader, epochs)
    finally:
        profile = diagnose.detach()
    return profile


def test_a_loader_is_described_with_the_line_and_the_call_that_made_it(tmp_path):
    diagnose.attach(tmp_path / "run")
    made = DataLoader(ROWS, batch_size=4, shuffle=True)
    train(made, epochs=3)
    (loader,) = diagnose.detach().program.loaders
    assert (loader.num_workers, loader.batch_size, loader.epochs) == (0, 4, 3)
    assert (loader.dataset, loader.dataset_length) == ("TensorDataset", 48)
    assert (loader.sampler, loader.collate) == ("RandomSampler", "default_collate")
    assert (loader.file, loader.line) == (__file__, line_of("made = DataLoader("))
    assert loader.call == "DataLoader(ROWS, batch_size=4, shuffle=True)"


PACKAGE = """
from torch.utils.data import DataLoader

def prepare(*loaders):
    return [DataLoader(dataset=each.dataset, batch_sampler=each.batch_sampler) for each in loaders]
"""


def test_what_a_package_makes_of_a_loader_has_the_line_of_that_one(tmp_path):
    package: dict[str, Any] = {}
    exec(compile(PACKAGE, "/usr/lib/python3/site-packages/acme/prepare.py", "exec"), package)
    diagnose.attach(tmp_path / "run")
    wet = DataLoader(TensorDataset(torch.zeros(40, 4)), batch_size=4)
    dry = DataLoader(TensorDataset(torch.zeros(24, 4)), batch_size=4)
    for loader in package["prepare"](wet, dry):
        train(loader)
    found = diagnose.detach().program.loaders
    assert [loader.line for loader in found] == [line_of("wet = DataLoader("), line_of("dry = DataLoader(")]
    assert [loader.num_objects for loader in found] == [1, 1]
    assert [loader.num_others for loader in found] == [0, 0]


class Stacked:
    """A collate function that is an object."""

    def __call__(self, rows: Any) -> Any:
        return [torch.stack(each) for each in zip(*rows, strict=True)]


def test_the_function_that_makes_a_batch_has_a_place_where_it_is_the_scripts_own():
    ways = (Stacked(), partial(Stacked.__call__, Stacked()), Stacked().__call__, None)
    loaders = [DataLoader(ROWS, batch_size=4, collate_fn=way) for way in ways]
    described = [loader_facts.described(loader, "", 0) for loader in loaders]
    places = [(facts["collate_file"], facts["collate_line"]) for facts in described]
    assert places == [(__file__, line_of("def __call__(self, rows"))] * 3 + [("", 0)]


def test_a_loader_made_before_measuring_began_has_no_line(tmp_path):
    (loader,) = profile_of(tmp_path / "run", DataLoader(ROWS, batch_size=4)).program.loaders
    assert (loader.file, loader.line, loader.call) == ("", 0, "")
    assert loader.batch_size == 4


def test_a_stream_is_told_from_a_dataset(tmp_path):
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ROWS)

    loaders = [DataLoader(Stream(), batch_size=4), DataLoader(ROWS, batch_size=8)]
    found = profile_of(tmp_path / "run", *loaders).program.loaders
    assert [(loader.dataset, loader.iterable) for loader in found] == [
        ("Stream", True),
        ("TensorDataset", False),
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dataset_on_a_device_is_told(device):
    rows = TensorDataset(torch.empty(8, 4, device=device), torch.empty(8, device=device))
    part = Subset(rows, [0, 1])
    for dataset in (rows, part, ConcatDataset([part, rows])):
        facts = loader_facts.described(DataLoader(dataset, batch_size=4), "", 0)
        assert facts["on_device"] is (device == "meta")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_batches_that_are_moved_to_a_device_as_they_are_made_are_told(tmp_path, device):
    def moved(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return torch.stack([row for (row,) in rows]).to(device)

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnose.attach(tmp_path / "run")
    for batch in DataLoader(ROWS, batch_size=4, collate_fn=moved):
        model(torch.zeros(len(batch), 4)).sum().backward()
        optimizer.step()
    (loader,) = diagnose.detach().program.loaders
    assert loader.moves_batches is (device == "meta")
    assert not loader.on_device


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
class Endless(Dataset[Any]):
    """Has samples of any index, and no length."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.zeros(4),)


def test_a_dataset_without_a_length_is_described_where_a_batch_sampler_draws_from_it(tmp_path):
    batches = [[0, 1], [2, 3], [4, 5]]
    found = profile_of(tmp_path / "run", DataLoader(Endless(), batch_sampler=batches))
    (loader,) = found.program.loaders
    assert (loader.dataset, loader.dataset_length) == ("Endless", None)
    assert not [note for note in found.notes if "measuring failed" in note]


class Waiting(Dataset[Any]):
    def __init__(self, num_rows: int, wait_s: float) -> None:
        self.num_rows, self.wait_s = num_rows, wait_s

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return torch.zeros(4)


def test_of_two_loaders_that_feed_each_step_the_slower_one_is_told_of(tmp_path):
    diagnose.attach(tmp_path / "run", warmup=0)
    quick = DataLoader(Waiting(60, 0), batch_size=2, num_workers=1)
    slow = DataLoader(Waiting(60, 0.005), batch_size=2, num_workers=1)
    train([rows] for rows, _ in zip(quick, slow, strict=True))
    profile = diagnose.detach()
    assert [loader.line for loader in profile.program.loaders] == [
        line_of("slow = DataLoader("),
        line_of("quick = DataLoader("),
    ]
    assert (profile.input.loaders_per_step, profile.input.batches_per_step) == (2, 2)
    assert profile.input.workers is not None
    assert profile.input.workers.num_workers == 1
    assert 8 * MS < profile.input.workers.fetch_ns < 40 * MS


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_which_a_batch_was_looked_at_feeds_no_step(tmp_path, num_workers):
    diagnose.attach(tmp_path / "run", warmup=0)
    next(iter(DataLoader(ROWS, batch_size=4, num_workers=num_workers)))
    # Longer than the other's workers take for their first batches, whatever else runs.
    train([rows] for rows in DataLoader(Waiting(80, 0.003), batch_size=2, num_workers=1))
    profile = diagnose.detach()
    assert profile.input.loaders_per_step == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
@pytest.mark.parametrize("forgotten", [True, False])
def test_of_a_loader_with_workers_and_one_without_the_slower_one_is_told_of(
    tmp_path: Path, forgotten: bool
):
    """Each with what the loop waits for it."""
    diagnose.attach(tmp_path / "run", warmup=0)
    slow = Waiting(120, 0 if forgotten else 0.01)
    first = DataLoader(slow, batch_size=2, num_workers=1, persistent_workers=True)
    second = DataLoader(Waiting(120, 0.005 if forgotten else 0.0001), batch_size=2)
    train([rows] for rows, _ in zip(first, second, strict=True))
    profile = diagnose.detach()
    lines = [line_of("second = DataLoader("), line_of("first = DataLoader(")]
    assert [loader.line for loader in profile.program.loaders] == (lines if forgotten else lines[::-1])
    assert (profile.input.loaders_per_step, profile.input.batches_per_step) == (2, 2)
    assert 0.7 < profile.input.main_wait_share < 1
    serial = [finding for finding in profile.findings if finding.rule == "serial-loading"]
    assert [finding.line for finding in serial] == (lines[:1] if forgotten else [])
    if not forgotten:
        assert profile.input.workers is not None and profile.input.workers.ready_batches is not None


def test_a_loader_that_only_evaluates_is_not_listed(tmp_path):
    diagnose.attach(tmp_path / "run")
    train(DataLoader(ROWS, batch_size=4))
    with torch.no_grad():
        list(DataLoader(ROWS, batch_size=2))
    assert [loader.batch_size for loader in diagnose.detach().program.loaders] == [4]


def test_the_loader_that_feeds_most_steps_comes_first(tmp_path):
    loaders = [
        DataLoader(ROWS, batch_size=16),
        DataLoader(ROWS, batch_size=1),
        DataLoader(ROWS, batch_size=8),
    ]
    found = profile_of(tmp_path / "run", *loaders).program.loaders
    assert [loader.batch_size for loader in found] == [1, 8, 16]


def test_a_loader_made_anew_on_the_same_line_each_epoch_is_one(tmp_path):
    diagnose.attach(tmp_path / "run")
    for _ in range(3):
        train(DataLoader(ROWS, batch_size=4))
    (loader,) = diagnose.detach().program.loaders
    assert (loader.epochs, loader.num_objects, loader.made_anew) == (3, 3, True)


def loader_made_by(rows: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=4, **options)


@pytest.mark.parametrize("other", ["evaluates", "waits", "another dataset", "workers"])
def test_another_loader_of_the_same_line_is_counted(tmp_path, other):
    rows = TensorDataset(torch.zeros(24, 4))
    diagnose.attach(tmp_path / "run")
    train(loader_made_by(ROWS))
    if other == "evaluates":
        with torch.no_grad():
            list(loader_made_by(ROWS))
    elif other == "waits":
        loader_made_by(ROWS)
    else:
        train(loader_made_by(rows) if other == "another dataset" else loader_made_by(ROWS, num_workers=1))
    assert [loader.num_others for loader in diagnose.detach().program.loaders] == [1]


@pytest.mark.parametrize("rows", [ROWS, [(row,) for row in ROWS.tensors[0]]], ids=["dataset", "list"])
def test_a_loader_made_anew_from_the_same_dataset_is_no_other(tmp_path, rows):
    diagnose.attach(tmp_path / "run")
    for _ in range(3):
        train(loader_made_by(rows))
        with torch.no_grad():
            list(DataLoader(rows))
    assert [loader.num_others for loader in diagnose.detach().program.loaders] == [0]


def test_a_loader_made_once_is_not_made_anew_though_its_line_makes_two(tmp_path):
    diagnose.attach(tmp_path / "run")
    pair = [DataLoader(ROWS, batch_size=4) for _ in range(2)]
    for loader in pair:
        train(loader, epochs=2)
    (loader,) = diagnose.detach().program.loaders
    assert (loader.epochs, loader.num_objects, loader.made_anew) == (4, 2, False)


def test_a_loader_keeps_its_signature_and_raises_what_it_raised(tmp_path):
    signature = inspect.signature(DataLoader.__init__)
    diagnose.attach(tmp_path / "run")
    try:
        assert inspect.signature(DataLoader.__init__) == signature
        with pytest.raises(ValueError, match="num_workers option should be non-negative"):
            DataLoader(ROWS, num_workers=-1)
    finally:
        diagnose.detach()
