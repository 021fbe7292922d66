"""Counts what one step asks of the machine: products, bytes, and calls that wait for the device.

A dispatch mode sees every operation of the step, of the backward pass too, calls it as it was called and
looks at its tensors' shapes. torch's profiler has `with_flops`, which knows fewer operations and no
backward convolution; `FlopCounterMode` takes operations apart and puts hooks on modules, which this must
not.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from diagnose.core.deep_window import WorkClass
from diagnose.hooks._frames import resolve, user_frame
from diagnose.hooks.base import hidden
from diagnose.hooks.device_settings import device_now

MAX_OPERATIONS = 2_000_000
"""In one step; more would keep the counting on for minutes."""

WAITING = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "equal")
)
"""Operations whose result the host needs."""

COPYING = frozenset(("aten::_to_copy", "aten::copy_"))
"""Operations that wait where they copy from a device to the host."""

NO_FORMULA = re.compile(r"_rnn(_|$)|grouped_mm|flash_attn|int\dpack_mm")
"""Operations that make products: where torch has no formula for one, the step's sum is not all of them."""


def why_not() -> str:
    """Says why a step cannot be counted; empty where it can."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["frames"].get("total"):
        return "compiled code is one operation to whoever counts"
    if torch._C._len_torch_dispatch_stack():
        return "the script looks at its operations itself (a dispatch mode is on)"
    return ""


class Counting(TorchDispatchMode):
    """Counts while it is entered and `on`.

    Args:
        in_optimizer: Whether an optimizer is stepping.
        work_of: Says what an operation is for, from its name and whether an optimizer is stepping.

    Attributes:
        on: Whether it still counts; else operations pass through.
        broken: Why it stopped counting, in words.
        num_operations: Operations seen.
        unknown: The first of them that makes products and has no formula; empty without.
    """

    def __init__(self, in_optimizer: Callable[[], bool], work_of: Callable[[str, bool], WorkClass]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on = True
        self.broken = ""
        self.num_operations = 0
        self.unknown = ""
        self._in_optimizer = in_optimizer
        self._work_of = work_of
        self._known: dict[Any, tuple[str, bool, Any]] = {}
        self._settings: dict[int, dict[str, Any]] = {}
        self._totals: dict[WorkClass, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._dtypes: Counter[str] = Counter()
        self._lines: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])

    def leave(self) -> bool:
        """Takes the mode off this thread; says whether it could: not under one of the script's."""
        depth = torch._C._len_torch_dispatch_stack()
        if not depth or torch._C._get_dispatch_stack_at(depth - 1) is not self:
            return False
        self.__exit__(None, None, None)
        return True

    def as_json(self) -> dict[str, Any]:
        """Returns what was counted, in the form of `core.deep_window.Counted`."""
        return {
            "work": [
                {"work": work.value, "count": count, "flops": flops, "num_bytes": num_bytes}
                for work, (count, flops, num_bytes) in self._totals.items()
            ],
            "dtype": self._dtypes.most_common(1)[0][0] if self._dtypes else "",
            "lines": [
                {"what": name, "count": count, "blocked_ns": spent, "file": file, "line": line}
                for (name, code, at), (count, spent) in self._lines.items()
                for file, line, _ in [resolve(code, at)]
            ],
            "unknown": self.unknown,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The very operation, not its Python wrapper: a warning then names the script's line.
        operation = getattr(func, "_op", func)
        begun = perf_counter_ns()
        try:
            result = operation(*args, **(kwargs or {}))
        except BaseException as error:
            error.__traceback__ = None  # the script's own frames come when it leaves us
            raise
        if self.on:
            spent = perf_counter_ns() - begun
            try:
                self._count(func, types, args, kwargs or {}, result, spent)
            except Exception as error:  # noqa: BLE001 (a hook meets the script)
                self.on = False
                self.broken = f"{func}: {type(error).__name__}: {error}"
        return result

    def _count(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, spent: int
    ) -> None:
        self.num_operations += 1
        if self.num_operations > MAX_OPERATIONS:
            raise OverflowError(f"more than {MAX_OPERATIONS:,} operations in a step")
        if any(kind.__name__ == "DTensor" for kind in types):
            raise TypeError("tensors of many ranks have other shapes here")
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = self._look_at(func)
        name, is_view, flops_of = known
        totals = self._totals[self._work_of(name, self._in_optimizer())]
        totals[0] += 1
        if flops_of is not None:
            flops = int(flops_of(*args, **kwargs, out_val=result))
            totals[1] += flops
            first = next(_tensors(args), None)
            if first is not None:
                self._dtypes[self._type_of(name, first)] += flops
        elif not self.unknown and NO_FORMULA.search(name):
            self.unknown = name
        if not is_view:
            totals[2] += sum(
                tensor.numel() * tensor.element_size()
                for group in (args, kwargs.values(), (result,))
                for tensor in _tensors(group)
            )
        if name in WAITING or (name in COPYING and _leaves_device(name, args, result)):
            frame = user_frame(sys._getframe(2))
            code, at = frame or (0, 0)
            line = self._lines[name, code, at]
            line[0] += 1
            line[1] += spent

    def _type_of(self, name: str, first: Any) -> str:
        """Returns the type that a product is computed in: tensor cores may take float32 as TF32."""
        if first.dtype != torch.float32 or first.device.type != "cuda":
            return str(first.dtype).removeprefix("torch.")
        index = first.device.index
        settings = self._settings.get(index)
        if settings is None:
            settings = self._settings[index] = device_now(index)
        if settings["capability"] < [8, 0]:
            return "float32"
        by_cudnn = "conv" in name and not settings["hip"]
        return "tf32" if settings["cudnn_tf32" if by_cudnn else "tf32"] else "float32"

    def _look_at(self, func: Any) -> tuple[str, bool, Any]:
        schema = func._schema
        name = schema.name
        returned = [each.alias_info for each in schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        return name, is_view, flop_registry.get(func._overloadpacket)


hidden(Counting.__torch_dispatch__)


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _leaves_device(name: str, args: tuple[Any, ...], result: Any) -> bool:
    if name == "aten::copy_":
        return bool(args[0].device.type == "cpu" and args[1].device.type != "cpu")
    return bool(result.device.type == "cpu" and args[0].device.type != "cpu")
