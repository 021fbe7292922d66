"""Facts of the loaders whose workers are started to evaluate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diagnose
from tests.test_loader_facts import ROWS


class FewRows(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4)


def evaluating(run_dir: Path, make: Callable[[], Any], *, once: bool = True, times: int = 3) -> Any:
    """What is known of the loaders that started workers in so many evaluations, each after a step."""
    diagnose.attach(run_dir)
    made = make()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step, (rows,) in enumerate(DataLoader(ROWS, batch_size=2)):
            model(rows).sum().backward()
            optimizer.step()
            if step in range(16, 16 + times):
                with torch.no_grad():
                    for more in made if once else make():
                        model(more)
    finally:
        profile = diagnose.detach()
    assert not any("measuring failed" in note for note in profile.notes)
    return profile.program.evaluating


def test_workers_that_are_started_to_evaluate_are_counted_with_the_loader_that_does(tmp_path):
    (found,) = evaluating(tmp_path / "run", lambda: DataLoader(FewRows(), num_workers=1))
    assert (found.starts, found.loader.epochs, found.loader.made_anew) == (3, 3, False)
    assert found.start_ns > 0
    assert found.loader.file == __file__
    assert found.loader.call == "DataLoader(FewRows(), num_workers=1)"


def test_a_loader_made_for_each_evaluation_starts_its_own_workers_although_they_persist(tmp_path):
    (found,) = evaluating(
        tmp_path / "run",
        lambda: DataLoader(FewRows(), num_workers=1, persistent_workers=True),
        once=False,
    )
    assert (found.starts, found.loader.made_anew) == (3, True)


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_that_are_kept_between_evaluations_are_started_once(tmp_path, workers: int):
    found = evaluating(
        tmp_path / "run",
        lambda: DataLoader(FewRows(), num_workers=workers, persistent_workers=workers > 0),
    )
    assert [each.starts for each in found] == [1] * workers
