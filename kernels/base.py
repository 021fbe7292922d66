"""What a kernel is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from diagnose.kernels._structs import TOLD_MANY_WORDS
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float64]]
"""The arrays of one parameter by the names of a row's fields, all float64: `p`, `g`, `m`, `v`, `v_max`."""

_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)

MANY = {"TOLD": TOLD_MANY_WORDS}
"""For launches that tell the table more than 4 KB of arguments hold."""

PAIR_NAMES = ("f32", "f32-bf16", "bf16", "f16", "f32-f16", "bf16-states-f32", "f16-states-f32", "bf16-f32")
"""Dtypes of parameter, gradient and states, in the order of a row's `pair`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a formula depends on beside the arrays.

    Attributes:
        step: Number of the step that is taken, from 1.
        flags: Of the group, as `_structs.GroupFlag`.
        clip_coef: What gradients are multiplied by first.
        max_norm: To which norm gradients are clipped.
    """

    step: int = 1
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    flags: int = 0
    clip_coef: float = 1.0
    max_norm: float = 1.0


class Kernel(ABC):
    """One `.cu` file, what it is compiled with, and the formula that it must agree with.

    Attributes:
        entries: Names of its `extern "C"` functions, in the order in which a step launches them.
        arrays: The arrays of a row that it uses.
        variants: Sets of defines with which it is compiled where nothing else occurs, by name. Results are
            those of the source without defines; registers are fewer.
        tolerance: How far fp32 results may be from the reference, as `rtol` and `atol` of
            `numpy.testing.assert_allclose`.
    """

    entries: ClassVar[tuple[str, ...]]
    arrays: ClassVar[tuple[str, ...]]
    variants: ClassVar[Mapping[str, Mapping[str, int]]] = {"all": {}}
    tolerance: ClassVar[Mapping[str, float]]

    @property
    def stem(self) -> str:
        """The file's name without its ending."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def name(self) -> str:
        """The file's name with dashes."""
        return self.stem.replace("_", "-")

    def source(self) -> str:
        """The whole source: what it includes stands in it."""
        return _inlined(f"{self.stem}.cu", set())

    @abstractmethod
    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        """Computes in float64 what the kernel does to one parameter. Leaves `arrays` alone."""


def one_variant_per_pair(**features: int) -> dict[str, dict[str, int]]:
    """The variants of a kernel that updates elements: each dtype pair alone, without further features, and
    the named feature masks for parameters in fp32 and bf16; and fp32 for launches that tell much."""
    plain = {name: {"PAIRS": 1 << pair, "FEATURES": 0} for pair, name in enumerate(PAIR_NAMES)}
    further = {
        f"{PAIR_NAMES[pair]}-{name}": {"PAIRS": 1 << pair, "FEATURES": mask}
        for name, mask in features.items()
        for pair in (0, 2)
    }
    return {"all": {}, **plain, **further, "f32-many": {**plain["f32"], **MANY}}


def _inlined(name: str, done: set[str]) -> str:
    """The text of a file with each file that it includes in place of its first `#include`."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8").replace("#pragma once\n", "")

    def included(match: re.Match[str]) -> str:
        other = match[1]
        if other in done:
            return "\n"
        done.add(other)
        line = text[: match.end()].count("\n") + 1
        return f'#line 1 "{other}"\n{_inlined(other, done)}#line {line} "{name}"\n'

    return f'#line 1 "{name}"\n' + _INCLUDE.sub(included, text)
