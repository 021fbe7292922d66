"""Which expressions have gradients of what a model computed."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from diagnose.source.effects import Effects
from diagnose.source.gradients import Gradients

HELPERS = """
def mean_iou(out, y):
    pred, total = out.argmax(1), 0.0
    for a, b in zip(pred, y):
        total += float((a & b).sum()) / max(1.0, float((a | b).sum()))
    return total / 21

def focal(out, y):
    chances = out.softmax(1)
    return (1 - chances).mean()

def again(out):
    return again(out) if out else 0

def by_the_model(x):
    return model(x)

def draws(out):
    yield out
"""


def gradients() -> Gradients:
    return Gradients(Effects({"a.py": ast.parse(HELPERS)}).functions)


@pytest.mark.parametrize(
    ("expression", "passes"),
    [
        ("out", True),
        ("out.logits", True),
        ("outer", False),
        ("out * 2 + 1", True),
        ("m.log_prob(out)", True),
        ("F.cross_entropy(out, y)", True),
        ("out[:, 0]", True),
        ("[row.sum() for row in out]", True),
        ("torch.stack([f(row) for row in out])", True),
        ("out > 0", False),
        ("(out.argmax(1) == y).float().mean()", False),
        ("out.argmax(1)", False),
        ("torch.argmax(out, 1)", False),
        ("out.max(1)[0]", True),
        ("out.max(1)[1]", False),
        ("out.topk(5).indices", False),
        ("table[out]", False),
        ("out.shape[0] * 2", False),
        ("[row.item() for row in out]", False),
        ("sum(int(a == b) for a, b in zip(out, y))", False),
        ("float(out) / len(out)", False),
        ("mean_iou(out, y)", False),
        ("focal(out, y)", True),
        ("focal(y, y)", False),
        ("again(out)", True),
        ("draws(out)", True),
    ],
)
def test_gradients_pass_through_what_computes_and_not_through_what_counts(expression, passes):
    assert gradients().pass_through(ast.parse(expression, mode="eval").body, {"out"}) is passes


def test_what_a_function_gets_from_around_it_may_have_gradients():
    assert gradients().pass_through(ast.parse("by_the_model(out)", mode="eval").body, {"out"})


def test_names_have_gradients_by_what_is_assigned_to_them():
    statements = ast.parse(
        dedent(
            """
            values, places = out.topk(5)
            loss, hits = crit(out, y), out.argmax(1) == y
            for row in values:
                rows.append(row)
            for place in places:
                self.table[place] += 1
            total += loss
            seen[rank] = hits
            """
        )
    )
    nodes = [node for node in ast.walk(statements) if isinstance(node, ast.stmt)]
    assert gradients().names(nodes, {"out"}) == {"out", "values", "loss", "row", "rows", "total"}
