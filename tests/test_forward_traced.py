"""A model of which torch writes down a graph is written down as without us."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.hooks._recorder import Recorder
from tests.fakes import FakeClock, SlowModel, measured, steps_of
from tests.running import DIAGNOSE, run, write


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(images))


@pytest.fixture(params=[False, True], ids=["at first", "after calls of the parts"])
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """With all hooks; the second time the classes of the model's parts have been called by themselves."""
    with measured(FakeClock()) as recorder:
        if request.param:
            nn.Linear(4, 4)(torch.ones(1, 4))
            nn.BatchNorm2d(3)(torch.ones(2, 3, 4, 4))
        yield recorder
        assert not recorder.notes


def test_fx_finds_the_modules_of_a_model(recorder):
    graph = torch.fx.symbolic_trace(Net()).graph
    assert [(node.op, str(node.target)) for node in graph.nodes] == [
        ("placeholder", "images"),
        ("call_module", "layer"),
        ("call_module", "norm"),
        ("output", "output"),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_model_takes_any_batch_and_nothing_is_warned_of(recorder):
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(Net().eval(), torch.ones(2, 3, 4, 4))
    assert traced(torch.ones(5, 3, 4, 4)).shape == (5, 3, 4, 4)
    assert "aten::size" not in str(traced.graph)


def test_an_exported_model_takes_any_batch(recorder):
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(Net().eval(), (torch.ones(2, 3, 4, 4),), dynamic_shapes=({0: batch},))
    assert exported.module()(torch.ones(5, 3, 4, 4)).shape == (5, 3, 4, 4)


@pytest.mark.parametrize("steps_before", [0, 1, 100])
def test_a_call_that_the_script_puts_in_place_of_torchs_is_made_while_it_is_there(
    monkeypatch, steps_before
):
    """As tools that draw or count a model's modules do for one call of it."""

    class Whole(SlowModel):
        pass

    clock = FakeClock()
    model, seen = Whole(clock, forward_ns=1), []
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)  # what the script leaves goes with it
    with measured(clock, "forward") as recorder:
        recorder.step_marked()
        for _ in range(steps_before):
            model(torch.ones(1, 4))
            recorder.step_marked()
        found = nn.Module.__call__

        def noting(module: nn.Module, *args: Any) -> Any:
            seen.append(type(module))
            return found(module, *args)

        for calls in range(1, 4):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nn.Module, "__call__", noting)
                model(torch.ones(1, 4))
            assert seen == [Whole, nn.Linear] * calls
            model(torch.ones(1, 4))
            assert seen == [Whole, nn.Linear] * calls
        recorder.step_marked()
        forward_ns = sum(step.times.get("forward", 0) for step in steps_of(recorder))
        assert forward_ns >= steps_before + 5, "but for a call that is the first one of all"
        assert not recorder.notes


def writes_by_fx(model: nn.Module) -> None:
    torch.fx.symbolic_trace(model)


def writes_by_tracing(model: nn.Module) -> None:
    torch.jit.trace(model, torch.ones(1, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("write", [writes_by_fx, writes_by_tracing])
def test_what_is_trained_after_a_graph_was_written_down_is_found(write: Callable[[Any], None]):
    class Model(nn.Module):
        def __init__(self, clock: FakeClock) -> None:
            super().__init__()
            self.clock, self.layer = clock, nn.Linear(4, 1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.clock.spend(7)
            return self.layer(rows)

    clock = FakeClock()
    with measured(clock, "forward") as recorder:
        write(Model(clock))
        recorder.step_marked()
        models = [Model(clock), SlowModel(clock, forward_ns=3)]
        for model in models:
            model(torch.ones(1, 4))
            recorder.step_marked()
        assert [step.times.get("forward", 0) for step in steps_of(recorder)] == [7, 3]
        assert [module() for module in recorder.met.modules] == models


PROFILED = """
import json, sys, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, rows):
        return self.two(self.one(rows))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiled:
    for step in range(4):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
profiled.export_chrome_trace(sys.argv[1])
with open(sys.argv[1]) as file:
    events = json.load(file)["traceEvents"]
print(sorted(event["name"] for event in events if str(event.get("name")).startswith("nn.Module")))
"""


@pytest.mark.extended
def test_a_profiler_that_records_stacks_knows_the_same_modules(tmp_path):
    """It knows a module's frame by the code of `nn.Module.__call__`, which it looks up once."""
    script = write(tmp_path / "train.py", PROFILED)
    plain = run(sys.executable, script, "plain.json", cwd=tmp_path)
    ours = run(*DIAGNOSE, script, "ours.json", cwd=tmp_path)
    assert ours.code == plain.code == 0, ours.stderr
    (modules,) = plain.stdout.splitlines()
    assert modules.count("Linear") == 8 and modules in ours.stdout.splitlines()
