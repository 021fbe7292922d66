"""Several of a script's batches in one step, on loops as people write them, against one written by hand."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diagnose.actions import _learning_rate
from diagnose.actions._learning_rate import RAMP_STEPS
from diagnose.actions.base import CannotApply
from diagnose.actions.fused_optimizer import FusedOptimizer
from diagnose.actions.gradient_accumulation import GradientAccumulation
from diagnose.core.job import Job
from diagnose.tuner.windows import window
from diagnose.tuner.world import Step, World
from tests.loops import begin
from tests.running import DIAGNOSE, only_run, run, write

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-3),
    "fused adam": lambda params: torch.optim.Adam(params, 1e-2, eps=1e-3, fused=True),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))


def rows(num: int = 42) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num, 5, generator=generator), torch.randint(2, (num,), generator=generator)
    )


def loss_of(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss_of(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


class Scaling:
    """A loop with a `GradScaler`, whose gradients overflow now and then."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.batches = 0

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.batches += 1
        loss = loss_of(model, batch) * (float("inf") if not self.batches % 5 else 1.0)
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()


@contextmanager
def on(job: Job, size: int, action: GradientAccumulation | None = None) -> Iterator[Any]:
    action = action or GradientAccumulation()
    before = action.state(job)
    with action.prepare(job, size) as ready, action.apply(job, ready):
        yield ready
    action.verify_undone(job, before)
    assert not job.on_iterator


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    ends: Sequence[int],
    clip: float = math.inf,
    lost: int = 0,
) -> None:
    """Trains on means of gradients of batches; a group ends after each batch whose number is in `ends`, and
    the step at batch number `lost` fails."""
    linear, group, taken = isinstance(optimizer, torch.optim.SGD), [], 0
    for number, batch in enumerate(batches, 1):
        model.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        group.append([p.grad.clone() for p in model.parameters()])
        if number in ends:
            for p, *gradients in zip(model.parameters(), *group, strict=True):
                p.grad = sum(gradients) / len(gradients)
            taken += 1
            full = len(group) if linear else math.sqrt(len(group))
            factor = 1 + (full - 1) * min(1.0, taken / RAMP_STEPS)
            rates = [each["lr"] for each in optimizer.param_groups]
            for each, rate in zip(optimizer.param_groups, rates, strict=True):
                each["lr"] = rate * factor
            if number != lost:
                optimizer.step()
            for each, rate in zip(optimizer.param_groups, rates, strict=True):
                each["lr"] = rate
            group = []


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-5, atol=1e-7)


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


def test_what_was_collected_is_stepped_on_when_it_is_taken_back():
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    batches = list(DataLoader(rows(28), 4))
    with on(job, 4):
        for batch in batches:
            plain(model, optimizer, batch)
        mine = [p.grad for p in model.parameters()]
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), mine, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.05
    twin = network()
    by_hand(twin, OPTIMIZERS["sgd"](twin.parameters()), batches, [4, 7])
    assert_alike(model, twin)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_raises_leaves_the_next_one_sound(fails_at, to_none, monkeypatch):
    """The script catches it, and goes on: the batches after it train as ever."""
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    real, calls = optimizer._init_group, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("in the step")
        return real(*args)

    monkeypatch.setattr(optimizer, "_init_group", failing)
    batches, caught = list(DataLoader(rows(32), 4)), 0
    with on(job, 2):
        for batch in batches:
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, batch).backward()
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                caught += 1
        assert optimizer.param_groups[0]["lr"] == 0.05
    assert caught == 1
    assert all(p.isfinite().all() for p in model.parameters())
    twin = network()
    # A step that had nothing to do loses nothing; one on the mean of a group loses the group.
    by_hand(
        twin,
        OPTIMIZERS["sgd"](twin.parameters()),
        batches,
        [2, 4, 6, 8],
        lost=0 if fails_at % 2 else fails_at,
    )
    assert_alike(model, twin)


def test_the_fused_optimizer_goes_with_it_in_either_order():
    ends = []
    for order in ((GradientAccumulation(), FusedOptimizer()), (FusedOptimizer(), GradientAccumulation())):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
        job = Job(models=[model], optimizers=[optimizer])
        plain(model, optimizer, next(iter(DataLoader(rows(), 4))))
        with ExitStack() as stack:
            for action in order:
                ready = stack.enter_context(action.prepare(job, 2))
                stack.enter_context(action.apply(job, ready))
            for batch in DataLoader(rows(32), 4):
                plain(model, optimizer, batch)
        assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
        ends.append(model)
    assert_alike(*ends)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_made_meanwhile_steps_on_each_batch(copied):
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    batches = list(DataLoader(rows(12), 4))
    with on(job, 4):
        for batch in batches:
            plain(model, optimizer, batch)
        twin, twins = copied((model, optimizer))
        for batch in batches:
            plain(twin, twins, batch)
        assert {float(state["step"]) for state in twins.state.values()} == {3.0}


class Own(torch.optim.SGD):
    """An optimizer of the user's."""


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: torch.optim.LBFGS(p), "no rule says what learning rate LBFGS needs"),
        (lambda p: Own(p, 0.1), "no rule says what learning rate Own needs"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "AdamW is capturable"),
    ],
)
def test_an_optimizer_without_a_rule_is_refused(make, reason):
    optimizer = make(list(nn.Linear(2, 2).parameters()))
    with pytest.raises(CannotApply, match=reason):
        GradientAccumulation().check(Job(optimizers=[optimizer]))


def test_a_loop_without_an_optimizer_is_refused():
    with pytest.raises(CannotApply, match="no optimizer has stepped"):
        GradientAccumulation().check(Job())


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    def again() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(again)


@pytest.mark.parametrize(
    "kind, loop, reason",
    [
        ("sgd", closure, "computes its loss itself"),
        ("fused adam", Scaling(), "leaves it to the fused step to unscale"),
    ],
)
def test_what_turns_out_not_to_fit_is_left_alone_and_says_why(kind, loop, reason):
    model, twin = network(), network()
    optimizer, plainly = (OPTIMIZERS[kind](each.parameters()) for each in (model, twin))
    job, action = Job(models=[model], optimizers=[optimizer]), GradientAccumulation()
    with on(job, 2, action) as ready:
        assert action.why_not_stay(ready) == ""
        for batch in DataLoader(rows(), 4):
            copy.copy(loop)(model, optimizer, batch) if isinstance(loop, Scaling) else loop(
                model, optimizer, batch
            )
        assert reason in action.why_not_stay(ready)
    for batch in DataLoader(rows(), 4):
        copy.copy(loop)(twin, plainly, batch) if isinstance(loop, Scaling) else loop(twin, plainly, batch)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_where_something_of_ours_fails_each_batch_is_stepped_on_as_ever(monkeypatch):
    model, twin = network(), network()
    optimizer, plainly = (OPTIMIZERS["sgd"](each.parameters()) for each in (model, twin))
    job, action = Job(models=[model], optimizers=[optimizer]), GradientAccumulation()
    monkeypatch.setattr(_learning_rate.Rate, "factor", None)
    with on(job, 2, action) as ready:
        batches = list(DataLoader(rows(16), 4))
        plain(model, optimizer, batches[0])
        plain(model, optimizer, batches[1])
        plain(twin, plainly, batches[1])
        assert "it failed in use: TypeError" in action.why_not_stay(ready)
        monkeypatch.undo()
        for batch in batches[2:]:
            plain(model, optimizer, batch)
            plain(twin, plainly, batch)
    assert_alike(model, twin)


def test_sparse_gradients_are_left_alone():
    table = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    job, action = Job(models=[table], optimizers=[optimizer]), GradientAccumulation()
    before = table.weight.detach().clone()
    with on(job, 2, action) as ready:
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        assert "sparse" in action.why_not_stay(ready)
    assert not torch.equal(before, table.weight)


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
