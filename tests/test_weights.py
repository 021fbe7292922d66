"""Names that hold a model's weights: what assigned them, and which call gave them on."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from diagnose.source.purposes import CLIP, EMA, PYTHON_LOOP, UPDATE, WHOLE
from diagnose.source.weights import Weights
from tests.marked import of_marked


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


NORMS = """
total = 0.0
for p in net.parameters():
    total += p.grad.norm().item() ** 2
n = total ** 0.5
k = rate / n
for p in net.parameters():
    p.grad *= {}  # here
"""


@pytest.mark.parametrize(("factor", "idiom"), [("k", CLIP), ("rate", PYTHON_LOOP)])
def test_what_a_gradient_is_scaled_by_is_followed_back_to_norms(factor: str, idiom: str):
    assert of_marked(NORMS.format(factor)) == (idiom,)


HOOKED = """
def limit(g):
    return {}  # here

for p in net.parameters():
    p.register_hook(limit)
"""


@pytest.mark.parametrize(
    ("text", "idioms"),
    [
        (HOOKED.format("torch.clamp(g, -1, 1)"), (CLIP,)),
        (HOOKED.format("g / (g.norm() + 1e-6)"), (CLIP,)),
        (HOOKED.format("g * mask"), ()),
        (HOOKED.replace("net.parameters()", "outputs").format("torch.clamp(g, -1, 1)"), ()),
        ("for p in net.parameters():\n    p.register_hook(lambda g: g.clamp(-1, 1))  # here", (CLIP,)),
        ("for p in net.parameters():\n    p.register_hook(lambda g: g * mask)  # here", (PYTHON_LOOP,)),
        ("x.register_hook(lambda g: g.clamp(-1, 1))  # here", ()),
    ],
)
def test_a_hook_of_each_weight_goes_over_the_gradients(text: str, idioms: tuple[str, ...]):
    assert of_marked(text) == idioms


@pytest.mark.parametrize(
    ("over", "idioms"),
    [
        ("net.parameters()", (CLIP,)),
        ("list(net.parameters())", (CLIP,)),
        ("(actor.parameters(), critic.parameters())", (PYTHON_LOOP,)),
        ("[group['params'] for group in optimizer.param_groups]", (PYTHON_LOOP,)),
        ("group['params']", (CLIP,)),
    ],
)
def test_torch_clips_lists_of_weights_at_once(over: str, idioms: tuple[str, ...]):
    assert of_marked(f"for w in {over}:\n    clip_grad_norm_(w, 1.0)  # here") == idioms


LISTS = """
now = list(net.parameters())
kept = [p.detach().clone() for p in now]
gs = [p.grad for p in now]
{}  # here
"""


@pytest.mark.parametrize(
    ("call", "idioms"),
    [
        ("torch._foreach_lerp_(kept, now, 0.1)", (EMA, WHOLE)),
        ("torch._foreach_add_(kept, now, alpha=0.1)", (EMA, WHOLE)),
        ("torch._foreach_mul_(ema_weights, 0.9)", (EMA, WHOLE)),
        ("torch._foreach_add_(now, gs, alpha=-lr)", (UPDATE, WHOLE)),
        ("torch._foreach_mul_(gs, coef)", (CLIP, WHOLE)),
        ("fast = list(torch._foreach_sub(fast, slopes, alpha=lr))", (WHOLE,)),
        ("torch._foreach_mul_(rows, 0.9)", (WHOLE,)),
        ("fast = [w.detach() for w in torch._foreach_sub(fast, slopes)]", (WHOLE,)),
        ("torch._foreach_copy_(fast, [w.clone() for w in rows])", (WHOLE,)),
        ("total = torch.stack([n.to(d) for n in torch._foreach_norm(gs)]).norm()", (CLIP, WHOLE)),
        ("torch._foreach_mul_([*rows], 0.9)", (WHOLE,)),
        ("average.update_parameters(net)", (EMA,)),
        ("average = AveragedModel(net, multi_avg_fn=f)\naverage.update_parameters(net)", (EMA, WHOLE)),
    ],
)
def test_what_is_done_in_one_call_for_all_is_no_loop(call: str, idioms: tuple[str, ...]):
    assert of_marked(LISTS.format(call)) == idioms


@pytest.mark.parametrize(
    "text",
    [
        "ys = [slow(t) for t in torch._foreach_sub(a, b)]",
        "ys = {k: v.tanh() for k, v in zip(names, torch._foreach_neg(a))}",
        "ys = [torch._foreach_norm([x]) for x in a]",
        "for x in a:\n    torch._foreach_mul_([x], 0.9)",
    ],
)
def test_a_loop_beside_such_a_call_or_around_calls_for_one_tensor_is_a_loop(text: str):
    assert of_marked(f"{text}  # here") == (PYTHON_LOOP,)
