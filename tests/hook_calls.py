"""Calls that take a known time, and the slots of the ledger that each belongs to, by hook.

Some of them need the process group of `tests.group_of_one`.
"""

from __future__ import annotations

import gc
import io
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.fakes import FakeClock, SlowData, SlowModel, SlowOptimizer

Call = Callable[[FakeClock], None]


class SlowList(list[Any]):
    """A list that takes some time to walk through."""

    def __init__(self, clock: FakeClock, items: Any, time_ns: int) -> None:
        super().__init__(items)
        self.clock, self.time_ns = clock, time_ns

    def __iter__(self) -> Iterator[Any]:
        self.clock.spend(self.time_ns)
        return super().__iter__()


class SlowToPickle:
    def __init__(self, clock: FakeClock, time_ns: int) -> None:
        self.clock, self.time_ns = clock, time_ns

    def __reduce__(self) -> Any:
        self.clock.spend(self.time_ns)
        return (list, ())


# -- what each hook charges: calls that take a known time, and the slots that it belongs to


def asks_a_loader(clock: FakeClock) -> None:
    for _ in DataLoader(SlowData(clock, num_rows=6, fetch_ns=5), batch_size=2):
        clock.spend(3)


def asks_a_loader_without_gradients(clock: FakeClock) -> None:
    with torch.no_grad():
        for _ in DataLoader(SlowData(clock, num_rows=6, fetch_ns=5), batch_size=2):
            clock.spend(3)


def asks_a_loader_that_asks_another(clock: FakeClock) -> None:
    class Outer(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            clock.spend(1)
            return next(iter(DataLoader(SlowData(clock, num_rows=1, fetch_ns=5))))

    for _ in DataLoader(Outer()):
        clock.spend(3)


def calls_a_model(clock: FakeClock) -> None:
    model = nn.Sequential(SlowModel(clock, forward_ns=4), SlowModel(clock, forward_ns=6))
    model[1].layer = nn.Linear(1, 1)
    model(torch.ones(2, 4))
    clock.spend(1)
    nn.MSELoss()(torch.ones(2), torch.ones(2))
    clock.spend(2)


def calls_a_submodule_first(clock: FakeClock) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = SlowModel(clock, forward_ns=4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            clock.spend(1)
            return self.part(rows)

    model = Model()
    for _ in range(3):
        model.part(torch.ones(2, 4))
        model(torch.ones(2, 4))
        clock.spend(2)


def calls_a_model_without_gradients(clock: FakeClock) -> None:
    model = SlowModel(clock, forward_ns=4)
    with torch.no_grad():
        model(torch.ones(2, 4))
        clock.spend(2)
        model(torch.ones(2, 4))
    with torch.inference_mode():
        clock.spend(2)
        model(torch.ones(2, 4))


def calls_a_model_that_fails(clock: FakeClock) -> None:
    class Model(nn.Module):
        def forward(self) -> None:
            clock.spend(4)
            raise ValueError

    with pytest.raises(ValueError):
        Model()()
    clock.spend(1)


def result_of(clock: FakeClock, time_ns: int) -> torch.Tensor:
    result = torch.ones(1, requires_grad=True) * 2
    result.register_hook(lambda gradient: clock.spend(time_ns))
    return result


def goes_backward(clock: FakeClock) -> None:
    result_of(clock, 7).backward()
    clock.spend(1)
    torch.autograd.backward([result_of(clock, 8)])
    weight = torch.ones(1, requires_grad=True)
    loss = weight * 2
    loss.register_hook(lambda gradient: clock.spend(9))
    torch.autograd.grad(loss, weight)


def goes_backward_within_backward(clock: FakeClock) -> None:
    class Checkpointed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            clock.spend(3)
            with torch.enable_grad():
                result_of(clock, 7).backward()
            clock.spend(2)
            return gradient

    Checkpointed.apply(torch.ones(1, requires_grad=True)).backward()
    clock.spend(1)


def goes_backward_and_fails(clock: FakeClock) -> None:
    result = result_of(clock, 7)
    result.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result.backward()
    clock.spend(1)


def steps_an_optimizer(clock: FakeClock) -> None:
    optimizer = SlowOptimizer(clock, SlowModel(clock), step_ns=7)
    optimizer.step()
    clock.spend(1)

    def closure() -> float:
        clock.spend(20)
        return 0.0

    optimizer.step(closure)
    optimizer.step(closure=closure)
    clock.spend(2)


def steps_an_optimizer_that_fails(clock: FakeClock) -> None:
    optimizer = SlowOptimizer(clock, SlowModel(clock), step_ns=7)
    with pytest.raises(TypeError):
        optimizer.step(lambda: 1 + None)
    clock.spend(5)  # torch calls nothing of ours where a step fails
    optimizer.step()
    clock.spend(1)


def clears_clips_and_schedules(clock: FakeClock) -> None:
    model = SlowModel(clock)
    optimizer = SlowOptimizer(clock, model, step_ns=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    scheduler.lr_lambdas = SlowList(clock, scheduler.lr_lambdas, 5)
    optimizer.param_groups = SlowList(clock, optimizer.param_groups, 3)
    optimizer.zero_grad()
    clock.spend(1)
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.nn.utils.clip_grad_norm_(SlowList(clock, model.parameters(), 7), 1.0)
    torch.nn.utils.clip_grad_value_(SlowList(clock, model.parameters(), 11), 1.0)
    clock.spend(2)


def scales_gradients(clock: FakeClock) -> None:
    model = SlowModel(clock)
    optimizer = SlowOptimizer(clock, model, step_ns=7)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    optimizer.param_groups = SlowList(clock, optimizer.param_groups, 3)
    scaler.unscale_(optimizer)
    optimizer.param_groups = optimizer.param_groups[:]  # which takes no time
    clock.spend(1)
    scaler.step(optimizer)
    scaler.update()
    clock.spend(2)


def saves_state(clock: FakeClock) -> None:
    torch.save(SlowToPickle(clock, 9), io.BytesIO())
    clock.spend(1)
    torch.serialization.save(SlowToPickle(clock, 8), io.BytesIO())
    clock.spend(1)


def saves_sharded_state(clock: FakeClock) -> None:
    from torch.distributed import checkpoint

    class App:
        def state_dict(self) -> dict[str, Any]:
            clock.spend(9)
            return {"weight": torch.ones(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Nowhere(checkpoint.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            clock.spend(4)
            torch.save(SlowToPickle(clock, 2), io.BytesIO())
            future: Any = torch.futures.Future()
            future.set_result([])
            return future

        def finish(self, metadata: Any, results: Any) -> None:
            pass

        def reset(self, checkpoint_id: Any = None) -> None:
            pass

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

    checkpoint.save({"app": App()}, storage_writer=Nowhere("/nowhere"))
    clock.spend(1)


def saves_safetensors(clock: FakeClock) -> None:
    import safetensors.torch

    class Slow(dict[str, Any]):
        time_ns = 9

        def items(self) -> Any:
            clock.spend(self.time_ns)
            self.time_ns = 0
            return super().items()

    with tempfile.TemporaryDirectory() as folder:
        safetensors.torch.save_file(Slow(weight=torch.ones(2)), f"{folder}/weights")
    clock.spend(1)


def calls_collectives(clock: FakeClock) -> None:
    import torch.distributed as dist

    dist.all_gather_object([None], SlowToPickle(clock, 9))
    clock.spend(1)
    dist.broadcast_object_list([SlowToPickle(clock, 8)])
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    clock.spend(2)


def waits_for_a_collective_that_runs_beside(clock: FakeClock) -> None:
    future: Any = torch.futures.Future()
    work = torch._C._distributed_c10d._create_work_from_future(future)

    def finish() -> None:
        time.sleep(0.2)  # by then the other thread waits
        clock.spend(6)
        future.set_result([torch.ones(1)])

    clock.spend(1)
    thread = threading.Thread(target=finish)
    thread.start()
    work.wait()
    thread.join()
    clock.spend(2)


def collects_garbage(clock: FakeClock) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            clock.spend(9)

    enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    Cycle()
    clock.spend(1)
    gc.collect()
    if enabled:
        gc.enable()
    clock.spend(2)


def switches_to_evaluation_and_back(clock: FakeClock) -> None:
    model = SlowModel(clock, forward_ns=4)
    model(torch.ones(1, 4))
    clock.spend(1)
    model.eval()
    clock.spend(20)
    model.train()
    clock.spend(2)
    model.train(False)
    clock.spend(30)
    model.train(mode=True)
    clock.spend(3)


CHARGES: dict[str, list[tuple[Call, dict[str, int]]]] = {
    "backward": [
        (goes_backward, {"backward": 24, "gap_after_backward": 1}),
        (goes_backward_within_backward, {"backward": 12, "gap_after_backward": 1}),
        (goes_backward_and_fails, {"backward": 7, "gap_after_backward": 1}),
    ],
    "checkpoint": [(saves_state, {"checkpoint": 17, "gap_after_rest": 2})],
    "checkpoint-distributed": [(saves_sharded_state, {"checkpoint": 15, "gap_after_rest": 1})],
    "checkpoint-safetensors": [(saves_safetensors, {"checkpoint": 9, "gap_after_rest": 1})],
    "collectives": [
        (calls_collectives, {"communication": 17, "gap_after_rest": 3}),
        (waits_for_a_collective_that_runs_beside, {"communication": 6, "gap_after_rest": 3}),
    ],
    "dataloader": [
        (asks_a_loader, {"data_wait": 30, "gap_after_data_wait": 9}),
        (asks_a_loader_without_gradients, {"evaluation": 39}),
        (asks_a_loader_that_asks_another, {"data_wait": 12, "gap_after_data_wait": 6}),
    ],
    "evaluation": [],
    "forward": [
        (calls_a_model, {"forward": 10, "gap_after_forward": 3}),
        (calls_a_submodule_first, {"forward": 27, "gap_after_forward": 6}),
        (calls_a_model_without_gradients, {"evaluation": 16}),
        (calls_a_model_that_fails, {"forward": 4, "gap_after_forward": 1}),
    ],
    "gc-pauses": [(collects_garbage, {"gc": 9, "gap_after_rest": 3})],
    "grad-scaler": [(scales_gradients, {"optimizer": 10, "gap_after_optimizer": 3})],
    "optimizer": [
        (steps_an_optimizer, {"optimizer": 21, "gap_after_rest": 40, "gap_after_optimizer": 3}),
        (steps_an_optimizer_that_fails, {"optimizer": 19, "gap_after_optimizer": 1}),
    ],
    "optimizer-rest": [(clears_clips_and_schedules, {"optimizer": 21, "gap_after_optimizer": 3})],
}
