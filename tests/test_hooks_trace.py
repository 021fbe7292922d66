"""Hooks leave no trace: on functions, on loaders, in what they replace."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import replaced
from tests.conftest import torch_attributes
from tests.fakes import HOOKS, FakeClock, SlowData, measured
from tests.hook_calls import CHARGES

pytest_plugins = ("tests.group_of_one", "tests.training_loops")
pytestmark = pytest.mark.usefixtures("group_of_one")

replacing = pytest.mark.parametrize("name", sorted(HOOKS))


# -- no trace


def stored() -> dict[str, object]:
    """Every watched attribute of torch, by full name."""
    return {
        f"{holder}.{name}": value
        for holder, attributes in torch_attributes().items()
        for name, value in attributes.items()
    }


def no_names(name: str) -> dict[str, object]:
    """What a hook puts into torch, by full name."""
    before = stored()
    with measured(FakeClock(), name):
        return {key: value for key, value in stored().items() if before.get(key) is not value}


@replacing
def test_a_hook_that_leaves_puts_back_the_very_objects_it_replaced(clock, name):
    before = stored()
    with measured(clock, name):
        for call, _ in CHARGES.get(name, []):
            call(clock)
    after = stored()
    assert {key: value for key, value in after.items() if before.get(key, value) is not value} == {}


@replacing
def test_a_hook_that_leaves_keeps_what_another_library_wrapped_around_it(clock, name):
    replaced_by_us = no_names(name)
    put_there: dict[str, tuple[Any, str, Any, Any]] = {}
    with measured(clock, name):
        for path in replaced_by_us:
            owner, attribute = holder_of(path)
            ours = vars(owner)[attribute]

            def theirs(*args: Any, _ours: Any = ours, **kwargs: Any) -> Any:
                return _ours(*args, **kwargs)

            put_there[path] = owner, attribute, ours, theirs
            setattr(owner, attribute, theirs)
    try:
        for owner, attribute, _, theirs in put_there.values():
            assert vars(owner)[attribute] is theirs
        for call, _ in CHARGES.get(name, []):
            call(clock)  # theirs calls ours, which calls torch's
    finally:
        for owner, attribute, ours, _ in put_there.values():
            setattr(owner, attribute, original_of(ours))


def test_looks_at_passes_end_with_their_hooks_whichever_closes_first():
    recorder = Recorder()
    names = "autograd-graph", "dropped-gradients", "hand-written-updates"
    opened = [HOOKS[name].install(recorder) for name in names]
    for each in opened:
        each.__enter__()
    assert (len(recorder.looks.on_backward), len(recorder.looks.on_pass)) == (2, 1)
    for each in opened:
        each.__exit__(None, None, None)
    assert (recorder.looks.on_backward, recorder.looks.on_pass) == ([], [])


def holder_of(path: str) -> tuple[Any, str]:
    name, _, attribute = path.rpartition(".")
    if name in sys.modules:
        return sys.modules[name], attribute
    module, _, cls = name.rpartition(".")
    return getattr(sys.modules[module], cls), attribute


def original_of(wrapper: Any) -> Any:
    """What a wrapper of ours calls, from its closure."""
    for variable, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True):
        if variable in ("original", "worker_loop"):
            return cell.cell_contents
    raise AssertionError(f"{wrapper} has no original")


def test_an_inherited_method_is_inherited_again_afterwards():
    class Base:
        def method(self) -> int:
            return 1

    class Child(Base):
        pass

    with replaced(Child, "method", lambda original: lambda self: original(self) + 1):
        assert (Child().method(), Base().method()) == (2, 1)
    assert "method" not in vars(Child)


def test_a_wrapped_function_keeps_its_name_docstring_and_signature(clock):
    import inspect

    plain = inspect.signature(torch.save), torch.save.__doc__, torch.save.__name__, torch.save.__module__
    with measured(clock):
        assert plain == (
            inspect.signature(torch.save),
            torch.save.__doc__,
            torch.save.__name__,
            torch.save.__module__,
        )


def test_the_iterator_of_a_loader_keeps_its_type_length_and_attributes(clock):
    loader = DataLoader(SlowData(clock, num_rows=6, fetch_ns=5), batch_size=2)
    plain = iter(loader)
    with measured(clock):
        batches = iter(loader)
        assert type(batches) is type(plain)
        assert len(batches) == len(plain) == len(loader) == 3
        assert vars(batches).keys() == vars(plain).keys()
        assert [row.tolist() for row in batches] == [row.tolist() for row in plain]


def test_a_loader_that_the_script_drops_at_the_end_of_an_epoch_is_gone(clock):
    data = SlowData(clock, num_rows=4, fetch_ns=5)
    held = weakref.ref(data)
    with measured(clock):
        for _ in DataLoader(data, batch_size=2):
            pass
        del data
        gc.collect()
        assert held() is None


def test_an_optimizer_that_is_given_a_model_gets_that_model(clock):
    given: list[Any] = []

    class Projected(torch.optim.SGD):
        def step(self, model: nn.Module) -> None:  # type: ignore[override]
            given.append(model)
            super().step()

    model = nn.Linear(4, 1)
    optimizer = Projected(model.parameters(), lr=0.1)
    with measured(clock):
        optimizer.step(model)
    assert given == [model]


def test_what_is_wrapped_in_every_step_leaves_nothing_behind(clock):
    """Lightning gives the optimizer a closure in each step."""
    from diagnose.hooks import base

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    with measured(clock):
        optimizer.step(closure)
        before = len(base._hidden_codes)
        for _ in range(20):
            optimizer.step(lambda: closure())
        assert len(base._hidden_codes) == before


@pytest.mark.parametrize(
    "path",
    [
        "torch.save",
        "torch.nn.utils.clip_grad_norm_",
        "torch.distributed.all_reduce",
        "torch.distributed.init_process_group",
        "torch.distributed.checkpoint.save",
        "torch.autograd.backward",
    ],
)
def test_a_function_can_be_handed_to_another_process_under_the_hooks(clock, path):
    import pickle

    import torch.distributed.checkpoint  # noqa: F401 (which has one of them)

    owner, name = holder_of(path)
    plain = getattr(owner, name)
    with measured(clock):
        pickled = pickle.dumps(getattr(owner, name))
    assert pickle.loads(pickled) is plain, "the other process has torch's own"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_gradient_within_torchscript_compiles_as_without_us(clock):
    """As molecular force fields take their forces."""
    from torch.jit import _builtins

    def forces(energy: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor | None]:
        return torch.autograd.grad([energy], [positions])

    def spread(energy: torch.Tensor) -> None:
        torch.autograd.backward([energy])

    known = len(_builtins._get_builtin_table()), len(_builtins._builtin_ops)
    positions = torch.ones(2, requires_grad=True)
    with measured(clock):
        (force,) = torch.jit.script(forces)((positions**2).sum(), positions)
        torch.jit.script(spread)((positions**2).sum())
    assert torch.equal(force, torch.full((2,), 2.0)) and torch.equal(positions.grad, force)
    assert (len(_builtins._get_builtin_table()), len(_builtins._builtin_ops)) == known


# -- names that a torch may lack


MISSING = {
    "backward": ("torch.autograd", "grad"),
    "checkpoint": ("torch", "save"),
    "dataloader": ("torch.utils.data.dataloader._BaseDataLoaderIter", "__next__"),
    "workers": ("torch.utils.data._utils.worker", "_worker_loop"),
    "evaluation": ("torch.nn.Module", "train"),
    "grad-scaler": ("torch.amp.grad_scaler.GradScaler", "unscale_"),
    "optimizer": ("torch.optim.optimizer", "register_optimizer_step_post_hook"),
    "optimizer-rest": ("torch.optim.Optimizer", "zero_grad"),
    "loader-facts": ("torch.utils.data.dataloader.DataLoader", "__iter__"),
    "queue-depth": ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter"),
    "drawn-order": ("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", "_try_put_index"),
    "now-and-then": ("torch", "set_anomaly_enabled"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_hook_whose_name_torch_lacks_is_off_and_the_report_says_which(monkeypatch, tmp_path, name):
    import diagnose

    owner, attribute = MISSING[name]
    target = sys.modules.get(owner) or holder_of(f"{owner}.")[0]
    before = stored()
    with monkeypatch.context() as patch:
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        patch.delattr(target, attribute)
        diagnose.attach(tmp_path / "run")
        for _ in range(3):
            parameter.grad = torch.ones(1)
            optimizer.step()
            diagnose.step()
        profile = diagnose.detach()
    assert stored() == before
    (note,) = [note for note in profile.notes if note.startswith(f"{name} is")]
    assert note == f"{name} is not measured: this torch has no {attribute}"


def test_every_replacing_hook_is_tried_without_one_of_its_names():
    replacing = {name for name in HOOKS if no_names(name)} | {"optimizer"}
    by_public_names = {
        "checkpoint-distributed",
        "checkpoint-safetensors",
        "collectives",
        "copy-to-device",
        "ddp-facts",
        "ddp-waits",
        "forward",
        "fsdp-waits",
        "optimizer-facts",
        "pipeline-facts",
        "process-group",
    }
    assert replacing - by_public_names <= set(MISSING)
