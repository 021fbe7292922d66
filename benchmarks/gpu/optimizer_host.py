"""What a step costs on the host: Python's part of it, with everything that would be a GPU's left out.

    python benchmarks/gpu/optimizer_host.py [--rounds 8]

Runs on a CPU. torch's kernels and ours are replaced by functions that return at once, so that what is left
is what each does to find out what to launch; on a GPU the launches themselves come on top, which are fewer
with ours. Contenders take turns, and the least of many rounds is printed: a loaded machine adds to some.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).parents[2]))

from diagnose.kernels._device import standing_in
from diagnose.kernels._swap import ClipLevel, swap, unswap

COUNTS = (100, 300, 1000)
"""Of parameters."""

WARM_STEPS, STEPS_PER_TURN = 3, 10

CPU = torch.device("cpu")


class Nowhere:
    """A device that takes launches and does nothing."""

    large_arguments = True

    def launch(self, *names: str, **how: Any) -> None:
        """See `Device.launch`."""

    def resident_blocks(self, *names: str, **how: Any) -> int:
        """See `Device.resident_blocks`."""
        return 264


@contextmanager
def without_arithmetic() -> Iterator[None]:
    """Replaces the functions that torch's optimizers and clipping end in."""
    with ExitStack() as stack:
        for name in dir(torch):
            if name.startswith("_foreach_") and name.endswith("_"):
                stack.enter_context(mock.patch.object(torch, name, lambda *args, **options: None))
        for name in ("_fused_adamw_", "_fused_adam_"):
            stack.enter_context(mock.patch.object(torch, name, lambda *args, **options: None))
        one = torch.ones(())
        for name in ("_foreach_norm", "_foreach_sqrt"):
            given = mock.Mock(side_effect=lambda tensors, *args: [one] * len(tensors))
            stack.enter_context(mock.patch.object(torch, name, given))
        yield


def parameters(count: int) -> list[nn.Parameter]:
    """Small ones, each with a gradient."""
    params = [nn.Parameter(torch.zeros(64)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(64)
    return params


class Step:
    """One way to do a step.

    Args:
        count: Of parameters.
        clips: Whether gradients are clipped before it.
        ours: How kernels of ours clip; `None` for torch's own step.
        moves: Whether gradients are elsewhere at each step.
        options: Of AdamW.
    """

    def __init__(
        self, count: int, *, clips: bool, ours: ClipLevel | None = None, moves: bool = False, **options: Any
    ):
        self._params = parameters(count)
        self._optimizer = torch.optim.AdamW(self._params, **options)
        self._places = [[param.grad for param in self._params], [torch.ones(64) for _ in self._params]]
        self._clips, self._ours, self._moves = clips, ours, moves
        self._optimizer.step()

    def times_ns(self, num: int) -> list[int]:
        """Does so many steps."""
        with ExitStack() as stack:
            if self._ours is not None:
                stack.enter_context(standing_in(CPU, Nowhere()))
                swap(self._optimizer, clip=self._ours)
                stack.callback(unswap, self._optimizer)
            else:
                stack.enter_context(without_arithmetic())
            return [self._time_ns() for _ in range(num + WARM_STEPS)][WARM_STEPS:]

    def _time_ns(self) -> int:
        if self._moves:
            self._places.reverse()
            for param, grad in zip(self._params, self._places[0], strict=True):
                param.grad = grad
        begun = time.perf_counter_ns()
        if self._clips:
            clip_grad_norm_(self._params, 1.0, foreach=True)
        self._optimizer.step()
        return time.perf_counter_ns() - begun


def measured(count: int, rounds: int) -> dict[str, float]:
    """The least time of each contender in microseconds."""
    ways: dict[str, Step] = {}
    for what, clips in (("clip and step", True), ("step", False)):
        levels: tuple[ClipLevel, ...] = ("exact", "deferred") if clips else ("off",)
        for level in levels:
            name = f"ours, {level} {what}" if clips else f"ours, {what}"
            ways[name] = Step(count, clips=clips, ours=level)
            ways[f"{name}, new gradients"] = Step(count, clips=clips, ours=level, moves=True)
        ways[f"torch fused, {what}"] = Step(count, clips=clips, fused=True)
        ways[f"torch default, {what}"] = Step(count, clips=clips, foreach=True)
    least: dict[str, int] = {}
    for number in range(rounds):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            took = min(ways[name].times_ns(STEPS_PER_TURN))
            least[name] = min(took, least.get(name, took))
    return {name: least[name] / 1000 for name in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    columns = [measured(count, args.rounds) for count in COUNTS]
    print("| host time in us | " + " | ".join(f"{count} parameters" for count in COUNTS) + " |")
    print("|---|" + "--:|" * len(COUNTS))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
