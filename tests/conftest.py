"""What every test is held to: it leaves torch, and the interpreter, as it found them."""

from __future__ import annotations

import gc
import operator
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    # Under `nohup`, or in the background of a shell, they are ignored, in all that a test starts, too.
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

pytest.register_assert_rewrite(
    # They hold fixtures, and are imported by tests before pytest takes them for plugins.
    "tests.compiled",
    "tests.group_of_one",
    "tests.kernels_on_cpu",
    "tests.loops",
    "tests.training_loops",
)

MODULES = (
    "safetensors.torch",
    "torch",
    "torch._dynamo.eval_frame",
    "torch.amp.grad_scaler",
    "torch.autograd",
    "torch.cuda",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.distributed_c10d",
    "torch.distributed.pipelining.schedules",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch.nn.parallel.distributed",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
    "torch.optim.lr_scheduler",
    "torch.optim.optimizer",
    "torch.serialization",
    "torch.utils.data._utils.collate",
    "torch.utils.data._utils.fetch",
    "torch.utils.data._utils.worker",
    "torch.utils.data.dataloader",
)
"""Every attribute of these modules, and of the classes they define, is watched once they are imported."""

TORCH_REPLACES = {
    # By `torch._dynamo`, when it is imported and when it first compiles.
    "torch.manual_seed",
    "torch.nn.modules.module.Module.__init__",
    "torch.nn.modules.module.Module.__setstate__",
    # By `init_process_group`; `destroy_process_group` leaves it.
    "torch.distributed.distributed_c10d._backend",
    # By the first use of a GPU.
    "torch.cuda._cached_device_count",
    "torch.cuda._initialized",
    "torch.cuda.default_generators",
}

HOOK_TABLES = (
    "torch._dynamo.callback.callback_handler.start_callbacks",
    "torch._dynamo.callback.callback_handler.end_callbacks",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
)
"""torch's own process-wide hooks."""

SETTINGS = (
    "torch.are_deterministic_algorithms_enabled",
    "torch.get_default_dtype",
    "torch.get_float32_matmul_precision",
    "torch.get_num_threads",
    "torch.is_grad_enabled",
)


NOTHING: dict[str, object] = {}
"""What a holder, or a name, that was not there had."""


def imported(name: str) -> Any:
    """The module, or what a module holds under that full name; `None` when nothing has imported it."""
    if name in sys.modules or "." not in name:
        return sys.modules.get(name)
    path, _, attribute = name.rpartition(".")
    holder = imported(path)
    if isinstance(holder, ModuleType):  # asking torch for `_dynamo` would import it
        return vars(holder).get(attribute)
    return getattr(holder, attribute, None)


def holders() -> Iterator[tuple[str, object]]:
    """The watched modules and the classes defined in them."""
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None:
            yield name, module
            for attribute, value in list(vars(module).items()):
                # `type()`, because some of torch's objects warn when `isinstance` looks at them
                if issubclass(type(value), type) and value.__module__ == name:
                    yield f"{name}.{attribute}", value


def subclasses(base: type) -> Iterator[type]:
    for child in base.__subclasses__():
        yield child
        yield from subclasses(child)


def torch_attributes() -> dict[str, dict[str, object]]:
    """The attributes of each holder as stored, and what of ours stands in as `__call__` of a model."""
    held = {name: dict(vars(owner)) for name, owner in holders()}
    if "torch.nn" in sys.modules:
        for model in subclasses(sys.modules["torch.nn"].Module):
            call = vars(model).get("__call__")
            if call is not None and is_ours(call):
                held.setdefault(f"{model.__module__}.{model.__qualname__}", {})["__call__"] = call
    return held


def global_state() -> dict[str, object]:
    """What a hook, an action or the sampler may change while it is at work, by name."""
    timers = Path("/proc/self/timers")
    return {
        **{name: list(table) for name in HOOK_TABLES if (table := imported(name)) is not None},
        **{name: get() for name in SETTINGS if (get := imported(name)) is not None},
        **{f"handler of signal {number}": signal.getsignal(number) for number in signal.valid_signals()},
        "environment": {
            key: os.environ[key] for key in os.environ if key.startswith(("DIAGNOSE_", "PYTHON"))
        },
        "gc.callbacks": [call for call in gc.callbacks if not is_of_hypothesis(call)],
        "gc.get_threshold()": (gc.isenabled(), gc.get_threshold()),
        "kernel timers": timers.read_text() if timers.exists() else "",
        "sys.excepthook": sys.excepthook,
        "sys.getprofile()": sys.getprofile(),
        "sys.getswitchinterval()": sys.getswitchinterval(),
        "sys.gettrace()": sys.gettrace(),
        "sys.meta_path": [finder for finder in sys.meta_path if is_ours(type(finder))],
        "threading.excepthook": threading.excepthook,
        "threads": {thread.name for thread in threading.enumerate() if "diagnose" in thread.name},
    }


def is_ours(value: object) -> bool:
    """Whether a function or class was defined in this project, whatever its `__module__` claims."""
    try:
        function = getattr(value, "__func__", value)
        names = (getattr(function, "__globals__", {}).get("__name__"), getattr(value, "__module__", None))
    except RuntimeError:  # a namespace of torch.classes, which takes every name for a class's
        return False
    return any(name in ("diagnose", "sitecustomize") or str(name).startswith("diagnose.") for name in names)


def is_of_hypothesis(call: object) -> bool:
    """Whether hypothesis, which times the collector from its first test on, has added this callback."""
    return str(getattr(call, "__module__", "")).startswith("hypothesis.")


def is_same(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Whether nothing was set or deleted: quick, for the thousands of attributes that are left alone."""
    return len(before) == len(after) and all(map(operator.is_, before.values(), after.values()))


def traces(before: Mapping[str, dict[str, object]], after: Mapping[str, dict[str, object]]) -> list[str]:
    """Names in torch that hold another object than before, or one of ours that they did not hold."""
    return sorted(
        f"{holder}.{name}"
        for holder, attributes in after.items()
        if not is_same(before.get(holder, NOTHING), attributes)
        for name, value in attributes.items()
        if (was := before.get(holder, NOTHING).get(name, NOTHING)) is not value
        if f"{holder}.{name}" not in TORCH_REPLACES and (was is not NOTHING or is_ours(value))
    )


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of global state that differ; SIGCHLD is torch's, which takes it for DataLoader workers."""
    theirs = f"handler of signal {int(signal.SIGCHLD)}"
    return sorted(name for name in before if name != theirs and before[name] != after[name])


def fail_for(left: list[str], what: str) -> None:
    if left:
        pytest.fail(f"{what} left these changed: {', '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_in_torch() -> Iterator[None]:
    """Looked at once a file: to go through all of torch takes longer than most tests."""
    before = torch_attributes()
    yield
    fail_for(traces(before, torch_attributes()), "one of these tests")


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_interpreter() -> Iterator[None]:
    before = global_state()
    yield
    fail_for(changes(before, global_state()), "the test")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU; torch sees none")
