"""What DDP tells of itself, and which of a job's ranks told it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diagnose.actions._ddp import with_fresh_reducers
from diagnose.analysis.profile import load_profile
from diagnose.analysis.program import ddp_of
from diagnose.core.ledger import COLUMNS
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.backward import BackwardHook
from diagnose.hooks.ddp_facts import DdpFactsHook
from diagnose.store.reader import RankLog, read_rank
from tests.fakes import HOOKS
from tests.running import DIAGNOSE, only_run, run, write

pytest_plugins = ("tests.group_of_one",)
pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    recorder.step_marked()
    with BackwardHook().install(recorder), DdpFactsHook().install(recorder):
        yield recorder
    assert not recorder.notes


def wrapped(recorder: Recorder) -> DistributedDataParallel:
    model = DistributedDataParallel(nn.Linear(4, 2), bucket_cap_mb=2)
    recorder.met.modules.append(weakref.ref(model))
    return model


def test_the_facts_tell_which_ranks_average_their_gradients_together(recorder):
    model = wrapped(recorder)
    model(torch.ones(1, 4)).sum().backward()
    assert recorder.facts["ddp"]["ranks"] == [0]


def test_the_line_of_the_script_that_made_it_is_known_until_the_hook_is_gone(recorder):
    model = wrapped(recorder)
    model(torch.ones(1, 4)).sum().backward()
    found = recorder.facts["ddp"]
    text = Path(found["file"]).read_text(encoding="utf-8").splitlines()[found["line"] - 1]
    assert text.strip() == "model = DistributedDataParallel(nn.Linear(4, 2), bucket_cap_mb=2)"


@pytest.mark.parametrize(("around", "averaged"), [("forward", 0.0), ("backward", 1.0)])
def test_whether_a_pass_is_averaged_is_decided_where_the_model_is_called(recorder, around, averaged):
    model = wrapped(recorder)
    for _ in range(4):
        with model.no_sync() if around == "forward" else nullcontext():
            loss = model(torch.ones(1, 4)).sum()
        with model.no_sync() if around == "backward" else nullcontext():
            loss.backward()
    assert recorder.facts["ddp"]["synced_share"] == averaged


def test_what_tuning_makes_of_a_model_is_no_fact_of_the_scripts(recorder):
    model = wrapped(recorder)

    def train() -> None:
        for _ in range(8):
            model(torch.ones(1, 4)).sum().backward()

    def change(model: DistributedDataParallel) -> None:
        model.bucket_bytes_cap = 1 << 20
        model.find_unused_parameters = True

    train()
    own = recorder.facts["ddp"]
    assert len(own["timed"]) > 4
    with with_fresh_reducers([model], change):
        train()
    train()
    assert recorder.facts["ddp"] == own


def test_a_rank_is_known_by_its_number_in_the_job_not_in_its_group_of_a_mesh():
    facts = {"ddp": {"rank": 1, "ranks": [0, 2], "world_size": 2}}
    log = RankLog(
        path=Path(), meta={"rank": 2, "facts": facts}, steps=np.ones((3, len(COLUMNS)), dtype=np.int64)
    )
    ddp = ddp_of(log)
    assert ddp is not None
    assert (ddp.rank, ddp.ranks, ddp.world_size) == (2, (0, 2), 2)


NO_SYNC = """
import sys
from contextlib import nullcontext
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    optimizer.zero_grad()
    with model.no_sync() if sys.argv[1] == "forward" else nullcontext():
        loss = (model(torch.ones(4, 8) + dist.get_rank())).sum()
    with model.no_sync() if sys.argv[1] == "backward" else nullcontext():
        loss.backward()
    optimizer.step()
own = model.module.weight.grad.clone()
both = [torch.empty_like(own) for _ in range(2)]
dist.all_gather(both, own)
if dist.get_rank() == 0:
    print("equal" if torch.equal(*both) else "different")
dist.destroy_process_group()
"""


@pytest.mark.extended
@pytest.mark.parametrize("around", ["forward", "backward", "nothing"])
def test_two_ranks_have_equal_gradients_where_their_passes_are_said_to_be_averaged(tmp_path, around):
    script = write(tmp_path / "train.py", NO_SYNC)
    ended = run(*DIAGNOSE, "--nproc-per-node", "2", script, around, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    averaged = "equal" in ended.stdout
    assert averaged == (around != "forward")
    folder = only_run(tmp_path)
    profile = load_profile(folder)
    assert [ddp.synced_share for ddp in profile.program.ddp] == [averaged] * 2
    assert [ddp.ranks for ddp in profile.program.ddp] == [(0, 1)] * 2
    assert (len(read_rank(folder / "rank0.sqlite").meetings) >= 30) == averaged
    assert (profile.program.meetings is not None) == averaged


@pytest.mark.parametrize(("taking_turns", "rounds"), [(False, 1), (True, 2)])
def test_optimizers_that_take_turns_are_told_from_those_that_share_the_parameters(
    recorder, taking_turns, rounds
):
    model = wrapped(recorder)
    one, other = (torch.optim.SGD([each], lr=0.01) for each in model.parameters())
    with HOOKS["optimizer"].install(recorder):
        for _ in range(40):
            model(torch.ones(1, 4)).sum().backward()
            if taking_turns:
                one.step()
            model(torch.ones(1, 4)).sum().backward()
            if not taking_turns:
                one.step()
            other.step()
            recorder.step_marked()
    ddp = recorder.facts["ddp"]
    assert ddp["rounds_per_step"] == pytest.approx(rounds, rel=0.1)
    assert ddp["num_models"] == 1


class Task(nn.Module):
    """A module that holds what is wrapped, and that the loop calls."""

    def __init__(self, *models: DistributedDataParallel) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        loss: torch.Tensor = self.models[which](x).sum()
        return loss


@pytest.mark.parametrize("count", [1, 2])
def test_models_inside_of_the_module_that_the_loop_calls_are_known_but_not_one_that_is_not_trained(
    recorder, count
):
    idle = DistributedDataParallel(nn.Linear(4, 2))
    task = Task(*(DistributedDataParallel(nn.Linear(4, 2), bucket_cap_mb=2) for _ in range(count)), idle)
    recorder.met.modules.append(weakref.ref(task))
    for _ in range(8):
        with torch.no_grad():
            task(torch.ones(1, 4), count)
        for which in range(count):
            task(torch.ones(1, 4), which).backward()
    ddp = recorder.facts["ddp"]
    assert ddp["num_models"] == count
    assert ddp["synced_share"] == 1.0
    assert ddp["bucket_cap_bytes"] == 2 << 20
    assert len(ddp["timed"]) > 4


def test_of_models_that_the_loop_calls_itself_and_others_the_former_are_told_of(recorder):
    task = Task(DistributedDataParallel(nn.Linear(4, 2)))
    recorder.met.modules.append(weakref.ref(task))
    model = wrapped(recorder)
    for _ in range(8):
        (model(torch.ones(1, 4)).sum() + task(torch.ones(1, 4))).backward()
    assert recorder.facts["ddp"]["bucket_cap_bytes"] == 2 << 20
    assert recorder.facts["ddp"]["num_models"] == 2
