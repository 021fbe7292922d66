"""Names that hold a model's weights: what assigned them, and which call gave them on."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest
from test_idioms import of_marked

from diagnose.analysis.statement_idioms import CLIP, EMA, PYTHON_LOOP, UPDATE
from diagnose.analysis.weights import Weights


@pytest.mark.parametrize(
    ("assignment", "holds"),
    [
        ("held = list(net.parameters())", True),
        ("held = [p for p in net.parameters() if p.requires_grad]", True),
        ("held = {n: p.detach().clone() for n, p in net.named_parameters()}", True),
        ("held = copy.deepcopy(net.state_dict())", True),
        ("held = tuple(zip(old.parameters(), net.parameters()))", True),
        ("held = [*head.parameters(), *body.parameters()]", True),
        ("held = list(head.parameters()) + list(body.parameters())", True),
        ("held, other = list(net.parameters()), list(old.parameters())", True),
        ("held = [p.numel() for p in net.parameters()]", False),
        ("held = sum(p.numel() for p in net.parameters())", False),
        ("held = torch.optim.AdamW(net.parameters())", False),
        ("held = len(list(net.parameters()))", False),
        ("held = [x for x in batches]", False),
    ],
)
def test_a_name_holds_weights_if_they_are_all_that_it_was_given(assignment: str, holds: bool):
    assert ("held" in Weights(ast.parse(assignment)).of(None)) is holds


def test_gradients_are_held_apart_from_weights():
    found = Weights(ast.parse("ps = list(net.parameters())\ngs = [p.grad for p in ps]"))
    assert (found.of(None), found.of(None, "gradients")) == ({"ps"}, {"gs"})


def test_what_a_call_gives_is_held_in_that_function_alone():
    tree = ast.parse(
        "def blend(a, b):\n    pass\n\ndef other(a):\n    pass\n\nblend(net.parameters(), b=1)"
    )
    found = Weights(tree)
    assert [found.of(function) for function in tree.body[:2]] == [{"a"}, set()]


def test_what_a_class_is_made_of_its_methods_have():
    text = """
        class Follower:
            def __init__(self, net, weights):
                self.mine = [p.clone() for p in weights]
                self.its = weights

        follower = Follower(net, net.parameters())
        """
    assert Weights(ast.parse(dedent(text))).of(None) == {"mine", "its"}


BLENDS = """
def blend(ours, theirs, much):
    for a, b in zip(ours, theirs):
        a.mul_(much).add_(b, alpha=1 - much)  # here

blend({}, {}, 0.99)
"""


@pytest.mark.parametrize(
    ("text", "idiom"),
    [
        (BLENDS.format("old.parameters()", "net.parameters()"), EMA),
        (BLENDS.format("rows", "means"), PYTHON_LOOP),
        ("kept = list(net.parameters())\nfor w in kept:\n    n = w.grad.norm()  # here", CLIP),
        ("gs = [w.grad for w in net.parameters()]\nfor g in gs:\n    n = g.norm()  # here", CLIP),
        ("gs = [row for row in rows]\nfor g in gs:\n    n = g.norm()  # here", PYTHON_LOOP),
        ("kept = [*net.parameters()]\nfor w in kept:\n    w.data.add_(w.grad, alpha=-lr)  # here", UPDATE),
    ],
)
def test_a_loop_over_what_holds_weights_goes_over_weights(text: str, idiom: str):
    assert of_marked(text) == (idiom,)
