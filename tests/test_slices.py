"""Statements of a loop that take a tensor apart, and those that only look like it."""

from __future__ import annotations

import ast

import pytest

from diagnose.analysis.slices import takes_slices


@pytest.mark.parametrize(
    ("statement", "takes"),
    [
        ("(x[:, i] - 0.5) / 0.25", True),
        ("out.append(torch.relu(x[:, i]))", True),
        ("means[:, i] = x[:, i].mean()", True),
        ("depth, *flow = x[group == i].sum(0)", True),
        # One turn needs the one before, or calls what may be a layer.
        ("h = torch.tanh(h + x[:, i])", False),
        ("total += x[:, i]", False),
        ("out.append(self.cell(x[:, i]))", False),
        ("out.append(cell(x[:, i]))", False),
        ("out.append(self.cells[i](x[:, i]))", False),
        # No slice of a tensor, or always the same.
        ("h = layers[i]", False),
        ("y = x[:, 0] * 2", False),
        ("y = x[group == 0] * 2", False),
    ],
)
def test_slices_are_taken_where_one_operation_could_do_all_turns(statement: str, takes: bool):
    loop = ast.parse(f"for i in range(9):\n    {statement}").body[0]
    assert isinstance(loop, ast.For)
    inner = loop.body[0]
    assert takes_slices(inner, (loop,), list(ast.walk(inner))) is takes
