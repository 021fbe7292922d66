"""The ledger closes for any program: every nanosecond of a step is charged to exactly one slot."""

from __future__ import annotations

import gc
import io
from contextlib import suppress
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.hooks._recorder import Recorder
from tests.fakes import FakeClock, SlowOptimizer, measured
from tests.hook_calls import SlowToPickle

Program = tuple[Any, ...]
"""An instruction and what belongs to it, programs to run inside it among them."""


class Failed(Exception):
    """What a program raises on purpose."""


class Machine:
    """Runs random programs with real models, optimizers and loaders."""

    def __init__(self, clock: FakeClock, recorder: Recorder) -> None:
        self.clock, self.recorder = clock, recorder
        self.models = [Runs(self), Runs(self)]
        self.optimizers = [SlowOptimizer(clock, model, step_ns=1) for model in self.models]
        self.batches: list[Any] = [None, None]

    def run(self, programs: tuple[Program, ...]) -> None:
        for name, *operands in programs:
            getattr(self, name)(*operands)

    def spend(self, time_ns: int) -> None:
        self.clock.spend(time_ns)

    def forward(self, which: int, inside: tuple[Program, ...]) -> None:
        self.models[which](torch.ones(2, 4), inside)

    def without_gradients(self, inside: tuple[Program, ...]) -> None:
        with torch.no_grad():
            self.run(inside)

    def evaluate(self, which: int, inside: tuple[Program, ...]) -> None:
        self.models[which].eval()
        self.run(inside)
        self.models[which].train()

    def switch(self, which: int, training: bool) -> None:
        self.models[which].train(training)

    def backward(self, which: int, inside: tuple[Program, ...]) -> None:
        with torch.enable_grad():
            loss = self.models[which].layer(torch.ones(2, 4)).sum()
            loss.register_hook(lambda gradient: self.run(inside))
            loss.backward()

    def step(self, which: int) -> None:
        self.optimizers[which].step()

    def step_with_closure(self, which: int, inside: tuple[Program, ...]) -> None:
        self.optimizers[which].step(lambda: self.run(inside))

    def zero_grad(self, which: int) -> None:
        self.optimizers[which].zero_grad()

    def next_batch(self, which: int, inside: tuple[Program, ...]) -> None:
        if self.batches[which] is None:
            self.batches[which] = iter(DataLoader(RunsToFetch(self, inside)))
        if next(self.batches[which], None) is None:
            self.batches[which] = None

    def save(self, time_ns: int) -> None:
        torch.save(SlowToPickle(self.clock, time_ns), io.BytesIO())

    def collect(self, inside: tuple[Program, ...]) -> None:
        RunsWhenDeleted(self, inside)
        gc.collect(0)

    def mark(self) -> None:
        self.recorder.step_marked()

    def fail(self) -> None:
        raise Failed

    def survive(self, inside: tuple[Program, ...]) -> None:
        try:
            self.run(inside)
        except Failed:
            self.clock.spend(1)


class Runs(nn.Module):
    """A model whose call runs a program."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.machine = [machine]

    def forward(self, rows: torch.Tensor, inside: tuple[Program, ...]) -> torch.Tensor:
        self.machine[0].run(inside)
        return self.layer(rows)


class RunsToFetch(Dataset[Any]):
    """Two rows whose fetching runs a program."""

    def __init__(self, machine: Machine, inside: tuple[Program, ...]) -> None:
        self.machine, self.inside = machine, inside

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.machine.run(self.inside)
        return index


class RunsWhenDeleted:
    """Garbage whose collection runs a program."""

    def __init__(self, machine: Machine, inside: tuple[Program, ...]) -> None:
        self.machine, self.inside, self.cycle = machine, inside, self

    def __del__(self) -> None:
        with suppress(Failed):
            self.machine.run(self.inside)


def programs() -> st.SearchStrategy[tuple[Program, ...]]:
    which = st.integers(0, 1)
    time_ns = st.integers(1, 9)
    simple = st.one_of(
        st.tuples(st.just("spend"), time_ns),
        st.tuples(st.just("step"), which),
        st.tuples(st.just("zero_grad"), which),
        st.tuples(st.just("save"), time_ns),
        st.tuples(st.just("switch"), which, st.booleans()),
        st.tuples(st.just("mark")),
        st.tuples(st.just("fail")),
    )

    def nested(inner: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
        inside = st.lists(inner, max_size=4).map(tuple)
        return st.one_of(
            st.tuples(st.sampled_from(["forward", "evaluate", "backward", "next_batch"]), which, inside),
            st.tuples(st.just("step_with_closure"), which, inside),
            st.tuples(st.sampled_from(["without_gradients", "survive"]), inside),
            st.tuples(st.just("collect"), st.lists(st.tuples(st.just("spend"), time_ns)).map(tuple)),
        )

    return st.lists(st.recursive(simple, nested, max_leaves=12), min_size=1, max_size=12).map(tuple)


TRAINS = (("next_batch", 0, ()), ("forward", 0, ()), ("backward", 0, ()), ("step", 0))


EVALUATES = ("without_gradients", (("forward", 0, ()), ("spend", 3), ("forward", 0, ())))
TEACHES = (
    "step_with_closure",
    0,
    (("without_gradients", (("forward", 1, ()),)), ("spend", 5), ("zero_grad", 0)),
)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
@example(
    (*TRAINS, EVALUATES, ("spend", 5), ("collect", ()), ("spend", 3), *TRAINS * 3, EVALUATES, *TRAINS * 2)
)
@example((TEACHES, ("spend", 1), *TRAINS * 2, EVALUATES, *TRAINS * 2))
@example((*TRAINS, ("mark",), *TRAINS, ("mark",), *TRAINS))
@example((TRAINS[0], ("without_gradients", (TRAINS[1],)), TRAINS[3], TRAINS[3], TRAINS[0]))
@example((*TRAINS, ("step_with_closure", 0, (("spend", 2), ("fail",))), ("spend", 4), *TRAINS * 2))
def test_the_slots_of_every_step_add_up_to_the_time_since_the_step_before(program):
    clock = FakeClock()
    gc.disable()
    try:
        with measured(clock) as recorder:
            machine = Machine(clock, recorder)
            recorder.step_marked()
            recorder.finder.marked = False  # the mark was only to know where the first step begins
            begun_ns = clock.now_ns
            for part in program:
                machine.run((("survive", (part,)),))
            recorder.finish()
            rows = recorder.log.take_rows(10_000)
            assert not recorder.notes
            assert recorder.steps == len(rows)
    finally:
        gc.enable()
    ends = [begun_ns, *(row[0] for row in rows)]
    for row, was, now in zip(rows, ends[:-1], ends[1:], strict=True):
        named = dict(zip(COLUMNS, row, strict=True))
        assert sum(row[len(COUNTS) :]) == now - was, named
        assert min(row) >= 0, named
