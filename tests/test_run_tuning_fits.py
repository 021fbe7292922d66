"""A script that trains one model after the other, tuned: what a fit has used is freed when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diagnose.store.reader import read_rank
from tests.running import DIAGNOSE, PLAIN, only_run, run, write

pytestmark = pytest.mark.alone

FITS = """
import gc, os, sys, weakref
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
passes = 2 if "passes" in sys.argv else 1
if passes > 1:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
rows = TensorDataset(torch.randn(400, 3, 8, 8), torch.randn(400, 8))

def fit(epochs):
    body = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*body), nn.Flatten(), nn.Linear(192, 8))
    if passes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(epochs):
        for number, (image, wanted) in enumerate(DataLoader(rows, batch_size=8), 1):
            (model(image) - wanted).square().mean().backward()
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
    return weakref.ref(model), weakref.ref(optimizer)

for epochs in (passes, 40 * passes):
    alive = fit(epochs)
    gc.collect()  # what torch imports at a first step leaves it in a cycle
    print(alive[0]() is not None, alive[1]() is not None)
"""


def in_force(*actions: str) -> str:
    """A file for `--apply`."""
    return "".join(f"[[action]]\nname = {name}\n" for name in actions)


def fitted(folder: Path, actions: str, *arguments: str) -> list[tuple[str, dict[str, Any]]]:
    """Runs it; returns the tuner's events."""
    write(folder / "job.py", FITS)
    write(folder / "kept.toml", actions)
    ended = run(*DIAGNOSE, "--apply", "kept.toml", "job.py", *arguments, cwd=folder)
    assert (ended.code, ended.stdout) == (0, "False False\n" * 2), ended.stderr
    path = only_run(folder) / "rank0.sqlite"
    return [(kind, detail) for *_, kind, detail in read_rank(path).events]


def kept_and_let_go(events: list[tuple[str, dict[str, Any]]]) -> tuple[list[str], list[str]]:
    assert not [detail for kind, detail in events if kind in ("tuning_error", "dropped")]
    kept = [detail["action"] for kind, detail in events if kind == "trial" and detail["outcome"] == "kept"]
    if any(kind == "undone" for kind, _ in events):  # by noise: nothing was in force any more
        return kept, kept
    return kept, [detail["action"] for kind, detail in events if kind == "over"]


def test_alone_it_keeps_nothing(tmp_path):
    write(tmp_path / "job.py", FITS)
    assert run(*PLAIN, "job.py", cwd=tmp_path).stdout == "False False\n" * 2


def test_nor_does_it_with_changes_in_force_which_are_let_go_when_it_is_over(tmp_path):
    actions = in_force('"fused-optimizer"', '"channels-last"', '"micro-batching"\nvalue = 2')
    kept, let_go = kept_and_let_go(fitted(tmp_path, actions))
    assert "fused-optimizer" in kept and len(kept) >= 2
    assert sorted(let_go) == sorted(kept)


def test_nor_where_averages_between_ranks_are_left_out(tmp_path):
    kept, let_go = kept_and_let_go(fitted(tmp_path, in_force('"no-sync"'), "passes"))
    assert kept == let_go == ["no-sync"]


@pytest.mark.extended
def test_nor_where_its_blocks_are_compiled(tmp_path):
    kept, let_go = kept_and_let_go(fitted(tmp_path, in_force('"regional-compile"')))
    assert kept == let_go == ["regional-compile"]
