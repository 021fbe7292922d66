"""Cases of which CI tests some, and `-m extended` the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def mixed(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Any]:
    """Returns a parameter for each pair: `extended`, but for one that has each case of the longer list."""
    few = min(len(one), len(other))
    return [
        pytest.param(
            left, right, marks=[pytest.mark.extended] * ((i - j) % few != 0), id=f"{name}-{other_name}"
        )
        for i, (name, left) in enumerate(one.items())
        for j, (other_name, right) in enumerate(other.items())
    ]


def mostly_extended(cases: Mapping[str, Any], *usual: str) -> list[Any]:
    """Returns a parameter for each case: `extended`, but for the usual ones."""
    assert set(usual) <= set(cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.extended] * (name not in usual),
            id=name,
        )
        for name, case in cases.items()
    ]
