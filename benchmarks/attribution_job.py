"""A training script that wastes time where it is told to, and knows the truth: it times itself.

    diagnose run benchmarks/attribution_job.py loader --fault forward:busy:8 --fault dataset:sleep:0.1

`LOOPS` are the shapes of training loop it can take. `clock` keeps what each phase took by the script's own
reading of the time, and what each fault took; `--truth` writes both for `attribution.py` to compare with.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
from collections.abc import Callable
from pathlib import Path

import torch
from attribution_clock import asked_for, clock, fault
from attribution_parts import (
    BATCH_SIZE,
    NUM_FEATURES,
    NUM_ROWS,
    Batch,
    Classifier,
    History,
    Knot,
    LateClassifier,
    OwnLBFGS,
    OwnSGD,
    Rows,
    Stream,
    TimedRows,
    ValidationRows,
    augment,
    batches,
    collate,
    evaluate,
    evaluate_without_eval,
    get_batch,
    smoothed_loss,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

PERIOD = 5
"""Evaluation, checkpoint and collection come once in as many steps, each at a step of its own."""

WIDE = 2048
GATHER_ROW_NS = 2000
"""Roughly what it takes to copy a row of a wide table."""

EVALUATION_AT, CHECKPOINT_AT, COLLECTION_AT = 1, 2, 3


def plain_loop(model: nn.Module, loader: DataLoader[Batch]) -> None:
    """A loop over a DataLoader, with all that comes once in a while."""
    criterion = nn.CrossEntropyLoss()
    optimizer = OwnSGD(model.parameters(), lr=0.01, momentum=0.9)
    validation = DataLoader(ValidationRows(2), BATCH_SIZE)
    clock.start()
    for step, (x, y) in enumerate(loader):
        clock.lap("data_wait")
        any(False for _ in fault("before forward"))
        clock.lap("other")
        out = model(x)
        loss = criterion(out, y)
        clock.lap("forward")
        any(False for _ in fault("beside loss"))
        clock.lap("other")
        loss = loss + smoothed_loss(out, y)
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        optimizer.step()
        optimizer.zero_grad()
        clock.lap("optimizer")
        any(False for _ in fault("after optimizer"))
        if step % PERIOD == EVALUATION_AT:
            clock.lap("other")
            evaluate(model, validation)
            clock.lap("evaluation")
        if step % PERIOD == CHECKPOINT_AT:
            state = {"model": model.state_dict(), "history": History()}
            clock.lap("other")
            torch.save(state, io.BytesIO())
            clock.lap("checkpoint")
        if step % PERIOD == COLLECTION_AT:
            Knot()
            clock.lap("other")
            gc.collect()
            clock.lap("gc")
        clock.next_step()


def loader_loop(steps: int) -> None:
    plain_loop(Classifier(), DataLoader(Rows(steps), BATCH_SIZE, collate_fn=collate))


def iterable_loop(steps: int) -> None:
    plain_loop(Classifier(), DataLoader(Stream(steps), BATCH_SIZE, collate_fn=collate))


def workers_loop(steps: int) -> None:
    loader = DataLoader(
        TimedRows(steps), BATCH_SIZE, collate_fn=collate, num_workers=2, multiprocessing_context="fork"
    )
    plain_loop(Classifier(), loader)


def get_batch_loop(steps: int) -> None:
    """No loader: the batch is made before the forward pass."""
    rows, model = Rows(steps), Classifier()
    optimizer = OwnSGD(model.parameters(), lr=0.01)
    clock.start()
    for step in range(steps):
        x, y = get_batch(rows)
        clock.lap("data_wait")
        any(False for _ in fault("before forward"))
        clock.lap("other")
        loss = smoothed_loss(model(x), y)
        clock.lap("forward")
        optimizer.zero_grad()
        clock.lap("optimizer")
        loss.backward()
        clock.lap("backward")
        optimizer.step()
        clock.lap("optimizer")
        any(False for _ in fault("after optimizer"))
        if step % PERIOD == EVALUATION_AT:
            clock.lap("other")
            evaluate_without_eval(model, rows)
            clock.lap("evaluation")
        clock.next_step()


def get_batch_between_loop(steps: int) -> None:
    """No loader: the next batch is made while a device would be busy with this one, as nanoGPT does."""
    rows, model = Rows(steps), Classifier()
    optimizer = OwnSGD(model.parameters(), lr=0.01)
    x, y = get_batch(rows)
    clock.start()
    for _ in range(steps):
        out = model(x)
        loss = smoothed_loss(out, y)
        clock.lap("forward")
        x, y = get_batch(rows)
        clock.lap("data_wait")
        any(False for _ in fault("beside loss"))
        clock.lap("other")
        loss.backward()
        clock.lap("backward")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        any(False for _ in fault("after optimizer"))
        clock.next_step()


def generator_loop(steps: int) -> None:
    """No loader: a generator makes the batches."""
    model = Classifier()
    optimizer = OwnSGD(model.parameters(), lr=0.01)
    clock.start()
    for x, y in batches(Rows(steps), steps):
        clock.lap("data_wait")
        any(False for _ in fault("before forward"))
        clock.lap("other")
        loss = smoothed_loss(model(x), y)
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        optimizer.step()
        optimizer.zero_grad()
        clock.lap("optimizer")
        clock.next_step()


def list_loop(steps: int) -> None:
    """No loader: the batches lie ready, and each is augmented before use."""
    rows, model = Rows(steps), Classifier()
    optimizer = OwnSGD(model.parameters(), lr=0.01)
    prepared = [get_batch(rows) for _ in range(steps)]
    clock.start()
    for batch in prepared:
        x, y = batch
        x = augment(x)
        clock.lap("data_wait")
        any(False for _ in fault("before forward"))
        clock.lap("other")
        loss = smoothed_loss(model(x), y)
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        optimizer.step()
        optimizer.zero_grad()
        clock.lap("optimizer")
        any(False for _ in fault("after optimizer"))
        clock.next_step()


def table_loop(steps: int) -> None:
    """No loader and no function: operators, which run in C without a call, take the batch from a table."""
    rows, model = Rows(steps), LateClassifier()
    optimizer = OwnSGD(model.parameters(), lr=0.01)
    table_NW = torch.randn(NUM_ROWS, WIDE)
    _, size_ns = asked_for.get("gather", ("operator", 0))
    clock.start()
    for _ in range(steps):
        order_R = torch.randint(NUM_ROWS, (BATCH_SIZE + size_ns // GATHER_ROW_NS,))
        wide_RW = table_NW[order_R]  # fault: gather
        x, y = wide_RW[:BATCH_SIZE, :NUM_FEATURES], rows.labels_N[order_R[:BATCH_SIZE]]
        loss = smoothed_loss(model(x), y)
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        optimizer.step()
        optimizer.zero_grad()
        clock.lap("optimizer")
        clock.next_step()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    clock.lap("data_wait")
    any(False for _ in fault("in train_step"))
    clock.lap("other")
    loss = smoothed_loss(model(x), y)
    clock.lap("forward")
    loss.backward()
    clock.lap("backward")
    optimizer.step()
    optimizer.zero_grad()
    clock.lap("optimizer")


def helper_loop(steps: int) -> None:
    """No loader, and the step is a function of its own."""
    rows, model = Rows(steps), Classifier()
    optimizer = OwnSGD(model.parameters(), lr=0.01)
    clock.start()
    for _ in range(steps):
        x, y = get_batch(rows)
        train_step(model, optimizer, x, y)
        any(False for _ in fault("after optimizer"))
        clock.next_step()


def closure_loop(steps: int) -> None:
    """The optimizer calls back for the loss, as often as it likes."""
    model = Classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = OwnLBFGS(model.parameters(), lr=0.01, max_iter=2, history_size=2)
    clock.start()
    for x, y in DataLoader(Rows(steps), BATCH_SIZE, collate_fn=collate):
        clock.lap("data_wait")

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            clock.lap("optimizer")
            loss = criterion(model(x), y)
            clock.lap("forward")
            any(False for _ in fault("in closure"))
            clock.lap("other")
            loss.backward()
            clock.lap("backward")
            return loss

        optimizer.step(closure)
        clock.lap("optimizer")
        any(False for _ in fault("after optimizer"))
        clock.next_step()


LOOPS: dict[str, Callable[[int], None]] = {
    "loader": loader_loop,
    "workers": workers_loop,
    "iterable": iterable_loop,
    "get_batch": get_batch_loop,
    "get_batch-between": get_batch_between_loop,
    "generator": generator_loop,
    "list": list_loop,
    "table": table_loop,
    "helper": helper_loop,
    "closure": closure_loop,
}


def parse_fault(text: str) -> tuple[str, tuple[str, int]]:
    place, kind, size_ms = text.split(":")
    if kind not in ("busy", "sleep", "operator"):
        raise argparse.ArgumentTypeError(f"{kind!r} is neither busy nor sleep nor operator")
    return place, (kind, round(float(size_ms) * 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--fault", type=parse_fault, action="append", default=[], metavar="PLACE:busy|sleep|operator:MS"
    )
    parser.add_argument("--truth", type=Path, help="where to write what each step truly took, as JSON")
    args = parser.parse_args()
    asked_for.update(args.fault)
    clock.in_workers = args.truth.with_suffix(".workers") if args.truth else None
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other would make the step depend on the machine
    gc.disable()  # garbage waits for the loop's own `gc.collect()`

    LOOPS[args.loop](args.steps)

    if args.truth:
        truth = {"phases": clock.phases[: args.steps], "faults": clock.faults[: args.steps]}
        args.truth.write_text(json.dumps(truth))


if __name__ == "__main__":
    main()
