"""A script that trains one model after the other, tuned: what a fit has used is freed when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diagnose.store.reader import read_rank
from tests.running import DIAGNOSE, PLAIN, only_run, run, write

pytestmark = [pytest.mark.alone, pytest.mark.extended]

FITS = """
import gc, sys, weakref
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
told = dict(each.split("=") for each in sys.argv[1:])
passes, batch = int(told.get("passes", 1)), int(told.get("batch", 8))
if "short" in told:
    from diagnose.actions import optimizer_in_backward
    optimizer_in_backward.refuse_unless_short = lambda job: None
if "kernels" in told:
    from tests.kernels_on_cpu import kernels_on_cpu
    emulated = kernels_on_cpu()
    emulated.__enter__()
if passes > 1:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
rows = TensorDataset(torch.randn(400, 3, 8, 8), torch.randn(400, 8))

def fit(epochs):
    body = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*body), nn.Flatten(), nn.Linear(192, 8))
    if passes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(epochs):
        for number, (image, wanted) in enumerate(DataLoader(rows, batch_size=batch), 1):
            (model(image) - wanted).square().mean().backward()
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
    return weakref.ref(model), weakref.ref(optimizer)

for epochs in (passes, int(told.get("epochs", 10)) * passes):
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
    leave = ("--apply", "kept.toml", "--allow", "training")
    ended = run(*DIAGNOSE, *leave, "job.py", *arguments, cwd=folder)
    assert (ended.code, ended.stdout) == (0, "False False\n" * 2), ended.stderr
    path = only_run(folder) / "rank0.sqlite"
    return [(kind, detail) for *_, kind, detail in read_rank(path).events]


def kept(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    assert not [detail for kind, detail in events if kind == "tuning_error"]
    return [detail["action"] for kind, detail in events if kind == "trial" and detail["outcome"] == "kept"]


def test_alone_it_keeps_nothing(tmp_path):
    write(tmp_path / "job.py", FITS)
    assert run(*PLAIN, "job.py", cwd=tmp_path).stdout == "False False\n" * 2


def test_nor_does_it_with_changes_in_force(tmp_path):
    actions = in_force('"fused-optimizer"', '"channels-last"', '"micro-batching"\nvalue = 2')
    assert {"fused-optimizer", "micro-batching"} <= set(kept(fitted(tmp_path, actions)))


@pytest.mark.extended
def test_nor_where_averages_between_ranks_are_left_out(tmp_path):
    assert kept(fitted(tmp_path, in_force('"no-sync"'), "passes=2")) == ["no-sync"] * 2


@pytest.mark.extended
def test_nor_where_updates_are_made_in_the_backward_pass_which_ends_with_the_first_fit(tmp_path):
    events = fitted(tmp_path, in_force('"optimizer-in-backward"'), "short=yes")
    assert kept(events) == ["optimizer-in-backward"] * 2, "the second fit gets it, too"
    assert [detail["action"] for kind, detail in events if kind == "over"] == ["optimizer-in-backward"]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["fused-optimizer", "eight-bit-states"])
def test_nor_where_kernels_step(tmp_path, name):
    """What would be a GPU is emulated."""
    assert kept(fitted(tmp_path, in_force(f'"{name}"'), "kernels=yes", "batch=20")) == [name] * 2


@pytest.mark.extended
def test_nor_where_its_blocks_are_compiled(tmp_path):
    assert kept(fitted(tmp_path, in_force('"regional-compile"'))) == ["regional-compile"] * 2
