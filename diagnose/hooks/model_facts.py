"""What the models of the loop are made of, looked at once."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

MAX_NAMES = 20
"""Names kept of one kind: a report names a few, and says how many there are."""

MIN_NUMBERS = 1024
"""Fewer numbers may be running statistics, whose digits are wanted."""


class ModelFactsHook(Hook):
    """Reads the parameters and the layers of the outermost training modules, once, after some steps."""

    requires = "torch.nn.modules.module"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        def inspect() -> None:
            recorder.facts["models"] = [
                describe(model)
                for model in recorder.met.live_modules()
                if next(model.parameters(), None) is not None
            ]
            recorder.facts["memory_bytes"] = _memory_bytes()

        with added(recorder.looks.inspections, inspect):
            yield


def describe(model: Any) -> dict[str, Any]:
    """Returns the facts of `core.program.Model`."""
    from torch.nn import DataParallel, RNNBase, RNNCellBase

    inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None) or model
    params = list(model.parameters())
    dtypes: Counter[str] = Counter()
    for p in params:
        dtypes[str(p.dtype).removeprefix("torch.")] += p.numel() * p.element_size()
    convolutions = [m for m in inner.modules() if type(m).__name__ in ("Conv1d", "Conv2d", "Conv3d")]
    return {
        "kind": type(inner).__name__,
        "device": params[0].device.type,
        "num_tensors": len(params),
        "param_bytes": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "double_constants": _double_constants(inner),
        "num_convolutions": len(convolutions),
        "loops_in_torch": any(isinstance(m, RNNBase) and m.mode != "LSTM" for m in inner.modules())
        and not any(isinstance(m, RNNCellBase) for m in inner.modules()),
        "biased_before_norm": list(islice(_biased_before_norm(inner), MAX_NAMES)),
        "channels_last": _channels_last(convolutions),
        "is_data_parallel": isinstance(model, DataParallel),
        "num_replicas": len(model.device_ids) if isinstance(model, DataParallel) else 0,
    }


def _double_constants(model: Any) -> list[str]:
    """Names of tensors in float64, other than parameters, with so many numbers that a product with them
    takes a while; none that something else of a module has, too: another tensor, a number."""
    import torch

    wide: set[str] = set()
    others: set[str] = set()
    for module in model.modules():
        own = (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False))
        for name, value in (*own, *vars(module).items()):
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                others.add(name)
                continue
            is_wide = value.dtype in (torch.float64, torch.complex128)
            constant = is_wide and not isinstance(value, torch.nn.Parameter)
            (wide if constant and value.numel() >= MIN_NUMBERS else others).add(name)
    return sorted(wide - others)[:MAX_NAMES]


def _biased_before_norm(model: Any) -> Iterator[str]:
    """Names of convolutions with a bias whose next sibling is a batch normalization of as many channels."""
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.conv import _ConvNd

    for path, parent in model.named_modules():
        for (name, child), (_, following) in pairwise(parent.named_children()):
            if (
                isinstance(child, _ConvNd)
                and child.bias is not None
                and isinstance(following, _BatchNorm)
                and following.num_features == child.out_channels
            ):
                yield f"{path}.{name}".lstrip(".")


def _channels_last(convolutions: list[Any]) -> bool | None:
    import torch

    # The layout of a 1x1 kernel is both.
    weights = [c.weight for c in convolutions if c.weight.dim() == 4 and max(c.weight.shape[2:]) > 1]
    if not weights:
        return None
    return all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


def _memory_bytes() -> int | None:
    """Memory that this process may use: the machine's, or what its control group allows."""
    limits = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits, default=None)
