"""Constants in float64 without gradients: which a model holds, and which lines multiply with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diagnose.hooks.model_facts import describe
from diagnose.source.tensor_values import factors


class Projected(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("basis", torch.zeros(64, 32, dtype=dtype))
        self.register_buffer("count", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("weight", torch.zeros(64, 32, dtype=dtype))  # the layer's is float32
        self.window = torch.ones(2048, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "names"), [(torch.float64, ["basis", "window"]), (torch.float32, []), (torch.int64, [])]
)
def test_a_model_names_its_large_constants_in_float64(dtype: torch.dtype, names: list[str]):
    assert describe(nn.Sequential(Projected(dtype)))["double_constants"] == names


@pytest.mark.parametrize(("value", "names"), [(0.5, ["window"]), (None, ["basis", "window"])])
def test_a_constant_is_not_known_by_a_name_that_a_number_of_another_module_has(
    value: Any, names: list[str]
):
    scaled = nn.Linear(4, 4)
    scaled.basis = value
    assert describe(nn.Sequential(Projected(torch.float64), scaled))["double_constants"] == names


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("h = (x.double() @ self.basis).float()", {"basis"}),
        ("return torch.cos(x.double() @ self.basis.T[:8])", {"basis"}),
        ("h = torch.einsum('bi,ij->bj', x.double(), self.basis)", {"basis"}),
        ("h = F.conv1d(x.double(), self.bank)", {"bank"}),
        ("x = x * self.window", {"window"}),
        # Converted first, something else that takes time, or only a part of a statement.
        ("h = x @ self.basis.float()", set()),
        ("h = x @ self.basis.to(x.dtype)", set()),
        ("return self.body((x.double() @ self.basis).float())", set()),
        ("h = (x.double() @ self.basis).float() @ w", set()),
        ("h = (x @ w) * self.window", set()),
        ("x = x + self.window", set()),
        ("h = torch.einsum('bi,ij->bj', x.double(),", set()),
        ("", set()),
    ],
)
def test_a_line_is_told_by_what_it_multiplies_with_alone(line: str, found: set[str]):
    assert factors(line) == found
