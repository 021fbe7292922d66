"""Hooks leave no trace on the script's models and classes: they are called and pickled as alone."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.fakes import SlowData, SlowModel, SlowOptimizer, measured, steps_of

pytest_plugins = ("tests.training_loops",)


def test_models_and_their_classes_pickle_and_copy_under_the_hooks(clock, tmp_path):
    import copy
    import pickle

    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    with measured(clock):
        model(torch.ones(1, 4))
        copied = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    for other in (copied, again, loaded):
        assert vars(other).keys() == vars(model).keys()
        assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))


@pytest.mark.parametrize("inherited", [True, False])
def test_a_models_own_call_is_made_once(clock, inherited):
    class Counted(nn.Module):
        calls = 0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            return 2 * super().__call__(x)

        def forward(self, x: Any) -> Any:
            return x

    class Net(Counted):
        """Has it from the other."""

    model = Net() if inherited else Counted()
    with measured(clock, "forward") as recorder:
        for number in range(1, 4):
            assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
            assert model.calls == number
        assert recorder.listening
        assert "__call__" in vars(type(model)), "it is measured"


def test_a_class_that_lets_nothing_be_set_is_called_as_without_us(clock):
    class Sealed(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise AttributeError(f"{name} cannot be set")

    class Net(nn.Linear, metaclass=Sealed):
        pass

    model = Net(4, 2)
    with measured(clock, "forward") as recorder:
        for _ in range(2):
            model(torch.ones(1, 4))
        (note,) = recorder.notes
        assert "__call__ cannot be set" in note


def test_a_call_that_a_descriptor_makes_is_made_as_without_us(clock):
    class Net(nn.Linear):
        def times(self, factor: int, x: Any) -> Any:
            return factor * super().__call__(x)

        __call__ = functools.partialmethod(times, 2)

    model = Net(4, 2)
    rows = torch.ones(1, 4)
    with measured(clock, "forward") as recorder:
        for _ in range(2):
            assert torch.equal(model(rows), 2 * model.forward(rows))
        assert not recorder.notes


@pytest.mark.parametrize("has_own_call", [pytest.param(True, marks=pytest.mark.extended), False])
def test_a_class_of_the_script_pickles_by_value_as_without_us(clock, has_own_call):
    """As MLflow, joblib and Ray pickle what `__main__` defines."""
    import cloudpickle

    class Net(nn.Linear):
        if has_own_call:

            def __call__(self, x: Any) -> Any:
                return 2 * super().__call__(x)

    Net.__module__ = "__main__"
    model = Net(4, 2)
    with measured(clock):
        expected = model(torch.ones(1, 4))
        assert "__call__" in vars(Net)
        pickled = cloudpickle.dumps(model)
        assert "__call__" in vars(Net)
    elsewhere = (
        "import pickle, sys, torch; net = pickle.load(sys.stdin.buffer);"
        "print('__call__' in vars(type(net)), net(torch.ones(1, 4)).tolist(), 'diagnose' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", elsewhere], input=pickled, capture_output=True, check=True
    )
    assert ended.stdout.decode() == f"{has_own_call} {expected.tolist()} False\n"


@pytest.mark.parametrize("has_own_call", [True, False])
def test_dill_is_given_a_class_of_the_script_as_without_us(clock, has_own_call, monkeypatch):
    """As Hugging Face's datasets pickle what `map` is given. Of dill itself, which is not among what the
    tests need, its function with the arguments and results that it has."""
    dill = ModuleType("dill._dill")
    vars(dill)["_get_typedict_type"] = lambda cls, clsdict, attrs, postproc_list: (clsdict, attrs)
    monkeypatch.setitem(sys.modules, dill.__name__, dill)

    class Net(nn.Linear):
        if has_own_call:

            def __call__(self, x: Any) -> Any:
                return 2 * super().__call__(x)

    plain = dict(vars(Net))
    model = Net(4, 2)
    with measured(clock):
        model(torch.ones(1, 4))
        assert vars(Net).get("__call__") is not plain.get("__call__")
        given, attrs = dill._get_typedict_type(Net, dict(vars(Net)), None, [])
    assert given == plain and attrs is None


def test_no_model_gets_a_hook_of_torch(clock):
    model = nn.Sequential(nn.Linear(4, 2))
    with measured(clock):
        model(torch.ones(1, 4)).sum().backward()
        for module in model.modules():
            tables = [v for k, v in vars(module).items() if "hook" in k and isinstance(v, dict)]
            assert not any(tables)


def test_a_submodule_is_called_by_torchs_own_call(clock):
    calls: list[str] = []

    class Part(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe(1)
            while frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl"):
                assert frame.f_back is not None
                frame = frame.f_back
            calls.append(Path(frame.f_code.co_filename).name)
            return rows

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.part(rows)

    model = Whole()
    with measured(clock):
        for _ in range(3):
            model(torch.ones(1))
    assert calls == [Path(__file__).name] * 3, "no wrapper of ours stands between a model and its parts"


def test_after_an_evaluation_the_search_does_not_go_on_in_training(clock):
    own = vars(nn.Module)["__call__"]
    seen: list[bool] = []

    class Whole(SlowModel):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            seen.append(vars(nn.Module)["__call__"] is own)
            return super().forward(rows)

    model = Whole(clock, forward_ns=1, backward_ns=1)
    optimizer = SlowOptimizer(clock, model, step_ns=1)
    with measured(clock) as recorder:
        for index, rows in enumerate(DataLoader(SlowData(clock, num_rows=120, fetch_ns=1), batch_size=1)):
            model(rows).sum().backward()
            optimizer.step()
            if index % 10 == 9:
                with torch.no_grad():
                    model(rows)
            assert index < 70 or not recorder.listening
    assert len(seen) == 132
    assert all(seen[80:])


def test_a_model_that_appears_late_is_found_and_the_search_rests_meanwhile(clock):
    """Each look replaces a method of the class that all modules come from, which costs a millisecond."""

    class Late(SlowModel):
        pass

    early, late = SlowModel(clock, forward_ns=3), Late(clock, forward_ns=5)
    own_call, looked = nn.Module.__call__, []
    with measured(clock, "forward") as recorder:
        recorder.step_marked()
        for step in range(40):
            early(torch.ones(1, 4))
            looked.append(nn.Module.__call__ is not own_call)
            if step >= 20:
                late(torch.ones(1, 4))
            recorder.step_marked()
        times = [each.times.get("forward", 0) for each in steps_of(recorder)]
    assert nn.Module.__call__ is own_call
    assert all(looked[:8]) and not any(looked[9:16] + looked[17:32] + looked[33:]) and looked[16]
    assert times[:20] == [3] * 20
    assert times[33:] == [8] * 7
