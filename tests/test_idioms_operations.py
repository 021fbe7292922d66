"""What a line of operations on tensors is: a sync, a choice of rows, attention, a chain."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from diagnose.core.phases import Phase
from diagnose.source.attention import attention_lines
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import METRIC, SYNC
from diagnose.source.slices import is_chain
from diagnose.source.sources import Sources
from tests.marked import of_marked


@pytest.mark.parametrize(
    ("condition", "is_one"),
    [
        ("torch.isnan(loss)", True),
        ("torch.min(y) < -1", True),
        ("3 < torch.linalg.norm(y)", True),
        ("all(y >= 0)", True),
        ("step > 3", False),
        ("torch.cuda.device_count() > 1", False),
        ("torch.get_num_threads() > 1", False),
        ("device == torch.device('cuda')", False),
        ("all(y >= 0 for y in limits)", False),
        ("any(name in names)", False),
    ],
)
def test_a_condition_on_a_tensor_is_a_sync(condition: str, is_one: bool):
    assert (SYNC in of_marked(f"if {condition}:  # here\n    pass")) is is_one


IMPORTS = """
import os, re, torch
import numpy as np
import torch.nn.functional as F
from data import loss_of

class Rows:
    def __init__(self):
        self.rng = np.random.default_rng(3)
"""


@pytest.mark.parametrize(
    ("value", "idioms"),
    [
        ("int(re.sub('[^0-9]', '', name))", ()),
        ("int(re.search('[0-9]', name).group(0))", ()),
        ("int(os.environ['RANK'])", ()),
        ("int(np.random.randint(3))", ()),
        ("int(self.rng.integers(0, 8))", ()),
        ("float(torch.sum(x))", (SYNC,)),
        ("float(F.mse_loss(x, y))", (SYNC,)),
        ("float(loss_of(x).mean())", (SYNC,)),
        ("float(self.total)", ()),
        ("float(self.model.loss(x))", (SYNC,)),
    ],
)
def test_what_an_imported_package_gives_is_no_tensor_unless_it_is_torchs(
    value: str, idioms: tuple[str, ...]
):
    assert of_marked(f"{IMPORTS}\nx = {value}  # here") == idioms


CONSISTENT = """
class Consistent(nn.Module):
    def forward(self, logits, q):
        v, b, c = logits.shape
        mean = logits.mean(0)
        return sum((p.softmax(-1) - mean).square().sum() for p in logits) / v

    def each(self, x):
        return sum(x[:, i].exp() for i in range(9))
"""


def test_rows_of_what_was_given_may_be_few_and_large_and_indices_are_many(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(CONSISTENT)
    idioms = Idioms(Places(Sources()))

    def told(text: str, function: str) -> tuple[str, ...]:
        (line,) = (n for n, each in enumerate(CONSISTENT.splitlines(), 1) if text in each)
        return idioms.of([(str(script), line, function)], Phase.FORWARD)

    assert told("for p in logits", "Consistent.forward") == ("python-loop", "slices", "rows")
    assert told("for i in range", "Consistent.each") == ("python-loop", "slices")


ATTENDING = """
class Layer(nn.Module):
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, dim=2)
        scores = q @ k.transpose(-2, -1)
        mask = torch.ones(t, t).tril() == 0
        scores[mask] = float("-inf")
        weights = F.softmax(scores / 8, dim=-1)
        weights = self.dropout(weights)
        y = weights @ v
        return self.out(y)


class Head(nn.Module):
    def forward(self, x):
        odds = F.softmax(self.last(x), dim=-1)
        return odds * x
"""


def test_the_lines_of_attention_are_those_between_its_products_and_no_others():
    lines = ATTENDING.splitlines()
    found = attention_lines(ast.parse(ATTENDING))
    assert [lines[line - 1].strip().split(" = ")[0] for line in sorted(found)] == [
        "b, t, c",
        "scores",
        "mask",
        "scores[mask]",
        "weights",
        "weights",
        "y",
    ]


@pytest.mark.parametrize(
    ("statement", "is_one"),
    [
        ("x = x + 0.1 * x.roll(k, 1).clamp(-1, 1)", True),
        ("x += torch.sin(k * x)", True),
        ("h = torch.tanh(x[:, k] @ w + h)", False),
        ("h = torch.relu(layer(h))", False),
        ("y = x.roll(k, 1).clamp(-1, 1)", False),
    ],
)
def test_a_chain_is_a_loop_of_elementwise_operations_on_its_own_result(statement: str, is_one: bool):
    (loop,) = ast.parse(f"for k in range(9):\n    {statement}").body
    assert isinstance(loop, ast.For)
    (inner,) = loop.body
    assert is_chain(inner, [loop], list(ast.walk(inner))) is is_one


def test_a_curve_of_recalls_is_a_metric_by_its_name():
    text = "class RecallCurve:\n    def update(self, out, y):\n        row[0] += (out > at).sum()  # here\n"
    assert of_marked(text, "RecallCurve.update", "main") == (METRIC,)
