"""Several of a script's batches in one step, on loops as people write them, against one written by hand."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from diagnose.actions._learning_rate import RAMP_STEPS
from diagnose.core.job import Job
from diagnose.tuner.windows import window
from diagnose.tuner.world import Step, World
from tests.accumulated import OPTIMIZERS, Scaling, assert_alike, by_hand, loss_of, network, on, plain, rows
from tests.loops import begin
from tests.running import DIAGNOSE, only_run, run, write


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss_of(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 4])
def test_it_trains_as_a_loop_that_accumulates_by_hand(kind, size):
    """Eleven batches an epoch, the last of them smaller: groups end with the epochs."""
    model, loader = network(), DataLoader(rows(), 4)
    optimizer = OPTIMIZERS[kind](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    batches = begin(job, loader)
    with on(job, size):
        for epoch in range(3):
            for batch in batches if not epoch else begin(job, loader):
                plain(model, optimizer, batch)
            assert not any(
                p is not None and p.grad is not None and p.grad.isnan().any() for p in model.parameters()
            )
    twin = network()
    ends = {11 * e + n for e in range(3) for n in (*range(size, 11, size), 11)}
    by_hand(twin, OPTIMIZERS[kind](twin.parameters()), list(loader) * 3, sorted(ends))
    assert_alike(model, twin)


def leave(job: Job) -> None:
    """The loop over the last iterator has ended: nobody else has it."""
    job.loaders.clear()
    job.iterators.clear()


@pytest.mark.parametrize("end", ["left", "begun", "saved"])
def test_a_loop_that_leaves_its_epoch_early_finds_all_its_batches_trained_on(end):
    model, loader = network(), DataLoader(rows(), 4)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    job, batches = Job(models=[model], optimizers=[optimizer]), list(loader)
    kept = [begin(job, loader)]
    with on(job, 4):
        for batch in kept[0]:
            plain(model, optimizer, batch)
            if len(kept) == 6:
                break
            kept.append(batch)
        twin = network()
        by_hand(twin, OPTIMIZERS["sgd"](twin.parameters()), batches[:6], [4, 6])
        before = [p.detach().clone() for p in model.parameters()]
        mine = [p.grad for p in model.parameters()]
        if end == "left":
            leave(job)
            kept.clear()
        elif end == "begun":
            begin(job, loader)
        else:
            optimizer.state_dict()
        assert not all(map(torch.equal, before, model.parameters()))
        assert_alike(model, twin)
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), mine, strict=True))
        assert optimizer.param_groups[0]["lr"] == 0.05
        leave(job)
        kept.clear()
        assert_alike(model, twin)
        plain(model, optimizer, batches[0])


def test_batches_that_are_dropped_in_the_middle_of_a_step_wait_for_its_end():
    """A script that takes `next(iter(loader))` drops them before it calls its model, another one after."""
    model, loader = network(), DataLoader(rows(), 4)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    with on(job, 4) as (_, grouped):
        taken = [begin(job, loader)]
        batch = next(taken[0])
        plain(model, optimizer, batch)
        (route,) = job.routes[id(model)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(route(type(model).__call__, (model, batch[0]), {}), batch[1])
        leave(job)
        taken.clear()
        assert grouped[0].pending == 1
        loss.backward()
        optimizer.step()
        assert grouped[0].pending == 2


def test_a_loop_that_clips_has_each_batch_clipped():
    model, loader = network(), DataLoader(rows(32), 4)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    with on(job, 4):
        for batch in begin(job, loader):
            clipping(model, optimizer, batch)
    twin = network()
    by_hand(twin, OPTIMIZERS["sgd"](twin.parameters()), list(loader), [4, 8], clip=0.05)
    assert_alike(model, twin)


def test_a_batch_that_a_scaler_skips_is_no_part_of_a_group():
    model, loader = network(), DataLoader(rows(40), 4)
    optimizer, loop = OPTIMIZERS["adamw"](model.parameters()), Scaling()
    job = Job(models=[model], optimizers=[optimizer])
    batches = list(loader)
    with on(job, 2):
        for batch in batches:
            loop(model, optimizer, batch)
    assert loop.scaler.get_scale() == 64.0, "batches 5 and 10"
    twin = network()
    left = [batch for number, batch in enumerate(batches, 1) if number % 5]
    by_hand(twin, OPTIMIZERS["adamw"](twin.parameters()), left, [2, 4, 6, 8])
    assert_alike(model, twin)


def test_a_schedule_goes_on_by_the_scripts_batches_and_logs_show_its_rate():
    ends = []
    for tried in (False, True):
        model = network()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
        job, rates = Job(models=[model], optimizers=[optimizer]), []
        with ExitStack() as stack:
            if tried:
                stack.enter_context(on(job, 4))
            for _ in range(2):
                for batch in DataLoader(rows(), 4):
                    plain(model, optimizer, batch)
                    rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
                    schedule.step()
        ends.append(rates)
    assert ends[0] == ends[1]


def test_a_script_that_accumulates_itself_steps_less_often_still():
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    counted: list[int] = []
    batches = list(DataLoader(rows(32), 4))
    with on(job, 2) as (_, grouped):
        for number, batch in enumerate(batches, 1):
            (loss_of(model, batch) / 2).backward()
            if not number % 2:
                optimizer.step()
                counted.append(grouped[0].pending)
                optimizer.zero_grad()
    assert counted == [1, 0, 1, 0]


def test_between_steps_the_script_finds_the_gradients_and_states_it_knows():
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    with on(job, 2):
        for number, batch in enumerate(DataLoader(rows(24), 4), 1):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            mine = [p.grad for p in model.parameters()]
            before = [p.detach().clone() for p in model.parameters()]
            values = [gradient.clone() for gradient in mine]
            optimizer.step()
            assert all(p.grad is gradient for p, gradient in zip(model.parameters(), mine, strict=True))
            assert all(map(torch.equal, mine, values))
            moved = not all(map(torch.equal, before, model.parameters()))
            assert moved == (number % 2 == 0)
            steps = {float(state["step"]) for state in optimizer.state.values()}
            assert steps == ({number // 2} if number > 1 else set())


def test_a_parameter_that_has_a_gradient_only_now_and_then_counts_as_without_one_else():
    model = nn.ModuleList([nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)])
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    job = Job(models=[model], optimizers=[optimizer])
    before = [p.detach().clone() for p in model.parameters()]
    with on(job, 2):
        for used in (model[:1], model):
            optimizer.zero_grad()
            sum(layer(torch.ones(1, 3)).sum() for layer in used).backward()
            optimizer.step()
        assert model[0].weight.grad is not None
    rate = 1 + 1 / RAMP_STEPS
    torch.testing.assert_close(model[0].weight, before[0] - rate)
    torch.testing.assert_close(model[1].weight, before[1] - rate / 2)


@pytest.mark.parametrize("least, epoch, counted", [(8, 0, 8), (5, 0, 8), (9, 0, 12), (9, 7, 14), (8, 1, 8)])
def test_windows_hold_whole_groups(least, epoch, counted):
    """Each fourth step takes long: a window with one more of them would look slower. Short epochs, with
    which groups end, come first."""
    job = Job(epoch_steps=epoch)
    world = World(
        job=job,
        actions={},
        diagnose=_none,
        watch=_none,
        check_numerics=_none,
        tell=_none,
        stop=_none,
        clock=lambda: 0,
    )
    plan = window(world, least, 4)
    next(plan)
    with pytest.raises(StopIteration) as ended:
        for number in range(1, 100):
            plan.send(Step(number=number, time_ns=50_000_000 if number % 4 else 90_000_000, aside=False))
    seen = ended.value.value
    assert seen.steps == counted
    assert epoch > 1 or seen.mean_ns == 60_000_000


def _none(*args: Any) -> Any:
    raise AssertionError("never asked")


SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(60)), nn.Linear(48, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
data = torch.utils.data.TensorDataset(torch.randn(512, 48), torch.randint(2, (512,)))
steps = 0
for epoch in range(int(sys.argv[1])):
    for rows, labels in torch.utils.data.DataLoader(data, 4, shuffle=True):
        loss = nn.functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
print(steps, {float(state["step"]) for state in optimizer.state.values()}.pop() < steps)
"""


@pytest.mark.extended
@pytest.mark.alone
def test_a_run_that_names_it_tries_it_and_keeps_what_is_faster(tmp_path):
    write(tmp_path / "job.py", SCRIPT)
    options = ("--tune", "--allow", "training", "--only", "gradient-accumulation", "--json", "report.json")
    ended = run(*DIAGNOSE, *options, "job.py", "20", cwd=tmp_path)
    assert ended.stdout == f"{20 * 128} True\n", ended.stderr
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    (trial,) = found["trials"]
    assert (trial["action"], trial["state"]) == ("gradient-accumulation", "kept"), trial
    assert trial["measured_speedup"] > 1.1
    assert "without a way back" not in trial["reason"]
    assert only_run(tmp_path)


@pytest.mark.extended
def test_a_run_that_does_not_name_it_never_tries_it(tmp_path):
    write(tmp_path / "job.py", SCRIPT)
    ended = run(
        *DIAGNOSE, "--tune", "--allow", "training", "--json", "report.json", "job.py", "8", cwd=tmp_path
    )
    assert ended.code == 0
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "gradient-accumulation" not in [trial["action"] for trial in found["trials"]]
