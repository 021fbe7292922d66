"""The data, the model and the rest of `attribution_job.py`, with the places where it can waste time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import torch
from attribution_clock import asked_for, clock, fault
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

NUM_FEATURES = 128
NUM_CLASSES = 10
BATCH_SIZE = 32
NUM_ROWS = 2048

SLOW_ROWS = 8
"""One row in so many is slow to load, where rows are to be slow."""

Batch = tuple[Tensor, Tensor]


def make_rows() -> Batch:
    return torch.randn(NUM_ROWS, NUM_FEATURES), torch.randint(NUM_CLASSES, (NUM_ROWS,))


class Rows(Dataset[Batch]):
    """As many rows as the loop has steps for, from a small table."""

    def __init__(self, steps: int) -> None:
        self.rows_NF, self.labels_N = make_rows()
        self.length = steps * BATCH_SIZE

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        if index % SLOW_ROWS == 0:
            any(False for _ in fault("dataset"))
        return self.rows_NF[index % NUM_ROWS], self.labels_N[index % NUM_ROWS]


class TimedRows(Rows):
    """Takes the time of fetching a batch, which no script can see from outside a worker."""

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        begun_ns = perf_counter_ns()
        rows = [self[index] for index in indices]
        clock.spent("stage: fetch", begun_ns)
        return rows


class ValidationRows(Rows):
    def __getitem__(self, index: int) -> Batch:
        if index % SLOW_ROWS == 0:
            any(False for _ in fault("validation dataset"))
        return self.rows_NF[index % NUM_ROWS], self.labels_N[index % NUM_ROWS]


class Stream(IterableDataset[Batch]):
    def __init__(self, steps: int) -> None:
        self.rows = Rows(steps)

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self.rows)):
            if index % SLOW_ROWS == 0:
                any(False for _ in fault("stream"))
            yield self.rows[index]


def collate(items: list[Batch]) -> Any:
    begun_ns = perf_counter_ns()
    any(False for _ in fault("collate"))
    batch = default_collate(items)
    clock.spent("stage: collate", begun_ns)
    return batch


def get_batch(rows: Rows) -> Batch:
    any(False for _ in fault("get_batch"))
    chosen_B = torch.randint(NUM_ROWS, (BATCH_SIZE,))
    return rows.rows_NF[chosen_B], rows.labels_N[chosen_B]


def batches(rows: Rows, steps: int) -> Iterator[Batch]:
    for step in range(steps):
        any(False for _ in fault("generator"))
        yield default_collate([rows[step * BATCH_SIZE + offset] for offset in range(BATCH_SIZE)])


def augment(x_BF: Tensor) -> Tensor:
    any(False for _ in fault("augment"))
    return x_BF + 0.01 * torch.randn_like(x_BF)


class Scale(torch.autograd.Function):
    """A layer with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        any(False for _ in fault("backward"))
        return 2 * grads[0]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NUM_FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.head = nn.Linear(256, NUM_CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        hidden = Scale.apply(self.body(x_BF))
        if torch.is_grad_enabled():
            any(False for _ in fault("forward"))
            if "gc in forward" in asked_for:
                collect_in_forward()
        return self.head(hidden)


class LateClassifier(Classifier):
    """Reads the clock in the model: any call in the loop would be where samples of an operator land."""

    def forward(self, x_BF: Tensor) -> Tensor:
        clock.lap("data_wait")
        return super().forward(x_BF)


def smoothed_loss(out_BC: Tensor, y_B: Tensor) -> Tensor:
    """A loss that is a plain function, which no hook sees."""
    any(False for _ in fault("loss"))
    return nn.functional.cross_entropy(out_BC, y_B, label_smoothing=0.1)


class OwnSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        any(False for _ in fault("optimizer"))
        return super().step(closure)


class OwnLBFGS(torch.optim.LBFGS):
    def step(self, closure: Any) -> Any:
        any(False for _ in fault("optimizer"))
        return super().step(closure)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Batch]) -> float:
    model.eval()
    right = 0
    for x, y in loader:
        out = model(x)
        right += int((out.argmax(1) == y).sum())
        any(False for _ in fault("evaluation"))
    accuracy = right / len(loader)
    any(False for _ in fault("metric"))
    model.train()
    return accuracy


@torch.no_grad()
def evaluate_without_eval(model: nn.Module, rows: Rows) -> float:
    total = 0.0
    for _ in range(3):
        x, y = rows.rows_NF[:BATCH_SIZE], rows.labels_N[:BATCH_SIZE]
        total += float((model(x).argmax(1) == y).sum())
        any(False for _ in fault("evaluation"))
        out = model(x)
    return total + float(out.sum())


class Knot:
    """Garbage that only the collector can free, and that takes its time to go."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        any(False for _ in fault("gc"))


class KnotInForward(Knot):
    def __del__(self) -> None:
        any(False for _ in fault("gc in forward"))


def collect_in_forward() -> None:
    """The innermost phase wins: this time is no part of the forward pass around it."""
    KnotInForward()
    clock.lap("forward")
    gc.collect()
    clock.lap("gc")


class History:
    """What the script saves beside the weights; it takes its time to be pickled."""

    def __getstate__(self) -> dict[str, Any]:
        any(False for _ in fault("checkpoint"))
        return {"steps": len(clock.phases)}
