"""Functions that are given one weight after the other, or its gradient, by a loop or by a hook."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import CLIP, EMA, PYTHON_LOOP, UPDATE, WHOLE
from diagnose.source.sources import Sources
from tests.marked import FILE, of_marked

MIXES = """
class Blender:
    def mix(self, old, new):
        return old * self.beta + (1 - self.beta) * new  # here

for ours, theirs in zip(slow.parameters(), net.parameters()):
    ours.data = blender.mix(ours.data, theirs.data)
"""
KEPT = """
kept = {n: p.detach().clone() for n, p in net.named_parameters()}

def blend_(old, now, m):
    old.mul_(m).add_(now, alpha=1 - m)  # here

for n, p in net.named_parameters():
    blend_(kept[n], p.detach(), 0.9)
"""
IN_TWO = """
def blend_(old, now, m):
    old.mul_(m)
    old.add_(now, alpha=1 - m)  # here

for a, b in zip(slow.parameters(), net.parameters()):
    old, now = a.data, b.data
    blend_(old, now, 0.9)
"""
ENERGY = """
def energy(g):
    return (g * g).sum()  # here

total = sum(energy(p.grad) for p in net.parameters())
"""
LIMITS = """
def limit_(g, most):
    n = g.norm()
    g.mul_(most / (n + 1e-6))  # here

for p in net.parameters():
    g = p.grad
    limit_(g, 1.0)
"""
MOVES = """
def move_(p, g, lr):
    p.sub_(lr * g)  # here

for p, g in zip(params, grads):
    move_(p, g, 0.1)
"""
ADAM = """
def move_(p, m, lr):
    m.mul_(0.9).add_(p.grad)
    p.data.add_(p.grad * m, alpha=-lr)  # here

for group in groups:
    for p in group["params"]:
        move_(p, state[p], 0.1)
"""


@pytest.mark.parametrize(
    ("text", "idiom"),
    [
        (MIXES, EMA),
        (KEPT, EMA),
        (IN_TWO, EMA),
        (ENERGY, CLIP),
        (ENERGY.replace("(g * g).sum()", "g.pow(2).sum()"), CLIP),
        (ENERGY.replace("(g * g).sum()", "g.norm()"), CLIP),
        (ENERGY.replace("energy(p.grad)", "energy(p)").replace("(g * g)", "(g.grad ** 2)"), CLIP),
        (LIMITS, CLIP),
        (LIMITS.replace("g.mul_(most / (n + 1e-6))", "return g.clamp(-most, most)"), CLIP),
        (MOVES, UPDATE),
        (ADAM, UPDATE),
    ],
)
def test_a_function_that_loops_give_each_weight_does_what_a_loop_does(text: str, idiom: str):
    assert of_marked(text, "helper") == (idiom,)


PENALTY = """
def penalty(p):
    return (p ** 2).sum()  # here

for p in net.parameters():
    total += penalty(p)
"""
MASKS = """
def mask_(p, much):
    p.mul_(much)  # here

for p in net.parameters():
    mask_(p.data, 0.5)
"""


@pytest.mark.parametrize(
    "text",
    [
        PENALTY,
        MASKS,
        MIXES + "image = blender.mix(image, other)\n",  # mixup: not of weights alone
        MIXES.replace("slow.parameters()", "rows").replace("net.parameters()", "means"),
        MIXES.replace("theirs.data)", "noise)"),
        ENERGY + "print(energy(activations))\n",
        ENERGY + "most = max(map(energy, rows))\n",
        ENERGY.replace("net.parameters()", "rows").replace("p.grad", "p"),
        ENERGY.replace("(g * g).sum()", "(g * ref).sum()"),  # an angle to something else
        ENERGY.replace("g):", "g):\n    for _ in range(5):\n        g = g @ g"),  # Muon's
        MOVES.replace("p.sub_(lr * g)", "return p - lr * g"),  # may be a step inside of a loss
        MOVES.replace("p.sub_(lr * g)", "g -= (g @ p) * p"),
    ],
)
def test_what_does_something_else_or_is_given_something_else_is_none_of_these(text: str):
    assert of_marked(text, "helper") == ()


SHARED = """
def mix(a, b, t):
    return a * (1 - t) + b * t

def energy(g):
    return (g * g).sum()

def follow(slow, net, t):
    for p, q in zip(slow.parameters(), net.parameters()):
        p.data.copy_(mix(p.data, q.data, t))

def length(net):
    return sum(energy(p.grad) for p in net.parameters())
"""


@pytest.mark.parametrize(("function", "idiom"), [("mix", EMA), ("energy", CLIP)])
def test_what_another_file_gives_to_such_a_function_is_not_of_weights_alone(function: str, idiom: str):
    train, shared = "/train.py", "/shared.py"
    idioms = Idioms(Places(Sources({train: f"x = {function}(x, y, 0.5)\n", shared: SHARED})))
    rows = SHARED.splitlines()
    line = 2 + rows.index(next(row for row in rows if row.startswith(f"def {function}(")))
    inside = (shared, line, function)
    assert idioms.of([inside, (shared, 10, "follow"), (train, 1, "<module>")]) == (idiom,)
    assert idioms.of([inside, (train, 1, "<module>")]) == ()


def test_what_a_model_makes_of_its_weights_in_a_function_is_no_average():
    line = 1 + next(i for i, row in enumerate(MIXES.splitlines()) if row.endswith("# here"))
    idioms = Idioms(Places(Sources({FILE: MIXES})))
    assert idioms.of([(FILE, line, "Blender.mix")], phase=Phase.OTHER) == (EMA,)
    assert idioms.of([(FILE, line, "Blender.mix")], phase=Phase.FORWARD) == ()


HOOKED = """
def limit(c, g):
    return g.clamp(-c, c)  # here

for p in net.parameters():
    p.register_hook({})
"""
MADE = """
def limiter(c):
    def limit(g):
        return torch.clamp(g, -c, c)  # here
    return limit

for p in net.parameters():
    p.register_hook(limiter(1.0))
"""
LAMBDA = """
def limiter(c):
    return lambda g: g.clamp(-c, c)  # here

limit = limiter(1.0)
for p in net.parameters():
    p.register_hook(limit)
"""


@pytest.mark.parametrize(
    ("text", "idioms"),
    [
        (HOOKED.format("functools.partial(limit, 1.0)"), (CLIP,)),
        (HOOKED.format("partial(limit, c=1.0)"), (CLIP,)),
        (HOOKED.format("partial(note, p)"), ()),
        (HOOKED.format("partial(limit, 1.0)").replace("g.clamp(-c, c)", "g * c"), ()),
        (HOOKED.format("partial(limit, 1.0)").replace("net.parameters()", "outputs"), ()),
        (MADE, (CLIP,)),
        (MADE.replace("torch.clamp(g, -c, c)", "g * c"), ()),
        (MADE.replace("net.parameters()", "outputs"), ()),
        (MADE.replace("return limit\n", "return other or limit\n"), ()),
        (LAMBDA, (CLIP,)),
        (LAMBDA.replace("g.clamp(-c, c)", "g * c"), ()),
        (LAMBDA.replace("net.parameters()", "outputs"), ()),
    ],
)
def test_a_hook_may_be_bound_or_made_by_a_function(text: str, idioms: tuple[str, ...]):
    assert of_marked(text, "limit") == idioms


@pytest.mark.parametrize(
    ("call", "idioms"),
    [
        ("for p in net.parameters():\n    clip_grad_norm_([p], 1.0)", (CLIP,)),
        ("for p in net.parameters():\n    clip_grad_value_(parameters=(p,), clip_value=1.0)", (CLIP,)),
        ("for n, p in net.named_parameters():\n    clip_grad_norm_(parameters=p, max_norm=1.0)", (CLIP,)),
        ("ps = list(net.parameters())\nfor p in ps:\n    clip_grad_norm_([p], 1.0)", (CLIP,)),
        ("clip_grad_norm_([*net.parameters()], 1.0)", ()),
        ("clip_grad_norm_([net.scale], 1.0)", ()),
        ("clip_grad_norm_(group['params'], 1.0)", ()),
    ],
)
def test_a_list_of_one_weight_is_clipped_by_itself(call: str, idioms: tuple[str, ...]):
    assert of_marked(f"{call}  # here") == idioms


def test_lists_of_weights_are_clipped_at_once():
    over = "for net in nets:\n    clip_grad_norm_(net.parameters(), 1.0)  # here"
    assert CLIP not in of_marked(over)


UPDATES = """
param_lists = [list(actor.parameters()), list(critic.parameters())]

def update(opt, loss, params):
    opt.zero_grad(){skips}
    loss.backward()
    torch.nn.utils.clip_grad_norm_({given}, 1.0)  # here
    opt.step()

for opt, loss, params in zip(opts, losses, param_lists):
    update(opt, loss, params)
"""


@pytest.mark.parametrize(
    ("given", "skips", "clips"),
    [
        ("params", "", False),
        ("[params]", "", True),
        ("params", "\n    if params.grad is None: return", True),
    ],
)
def test_a_function_that_is_given_a_list_of_weights_clips_them_at_once(given: str, skips: str, clips: bool):
    text = UPDATES.format(given=given, skips=skips)
    assert (CLIP in of_marked(text, "update")) is clips


AVERAGED = """
from torch.optim.swa_utils import AveragedModel

def toward(share):
    return lambda average, now, _: average + share * (now - average)  # here

mean = AveragedModel(net, {}_fn=toward(0.1))
for x in rows:
    mean.update_parameters(net)
"""


@pytest.mark.parametrize(
    ("text", "idioms"),
    [
        (AVERAGED.format("avg"), (EMA,)),
        (AVERAGED.format("multi_avg"), (EMA, WHOLE)),
        (AVERAGED.format("avg").replace("AveragedModel", "Learner"), ()),
        (AVERAGED.format("avg").replace("mean.update_parameters(net)", "mean.follow(net)"), ()),
    ],
)
def test_what_torchs_averaged_model_calls_averages(text: str, idioms: tuple[str, ...]):
    rows = text.splitlines()
    line = 1 + next(i for i, row in enumerate(rows) if row.endswith("# here"))
    stack = [(FILE, line, "toward.<locals>.<lambda>"), (FILE, len(rows), "<module>")]
    assert Idioms(Places(Sources({FILE: text}))).of(stack) == idioms
    inside = [*stack[:1], (FILE, line, "Learner.update_parameters"), *stack[1:]]
    assert Idioms(Places(Sources({FILE: text}))).of(inside) == ()


@pytest.mark.parametrize(
    ("text", "line", "idiom"),
    [
        (MIXES, "ours.data = blender.mix(ours.data, theirs.data)", EMA),
        (MIXES, "for ours, theirs in zip(slow.parameters(), net.parameters()):", EMA),
        (ENERGY, "total = sum(energy(p.grad) for p in net.parameters())", CLIP),
        (MOVES, "    move_(p, g, 0.1)", UPDATE),
        (PENALTY, "    total += penalty(p)", PYTHON_LOOP),
        (MASKS, "    mask_(p.data, 0.5)", PYTHON_LOOP),
    ],
)
def test_the_line_that_calls_such_a_function_does_what_that_does(text: str, line: str, idiom: str):
    marked = text.replace("  # here", "").replace(line, f"{line}  # here")
    assert of_marked(marked, "main") == (idiom,)


STATIC = """
from pictures import shrink

class Trainer:
    @staticmethod
    def shrink(g):
        g.clamp_(-1, 1)

    def step(self, image):
        for p in self.net.parameters():
            self.shrink(p.grad)  # call
        return shrink(image)  # other
"""


@pytest.mark.parametrize(("mark", "idioms"), [("call", (CLIP,)), ("other", ())])
def test_a_static_method_is_told_from_a_function_of_its_name(mark: str, idioms: tuple[str, ...]):
    assert of_marked(STATIC.replace(f"# {mark}", "# here"), "Trainer.main") == idioms


SCALED = """
def energy(g):
    return {}

def main():
    total = 0.0
    for p in net.parameters():
        total += energy(p.grad)
    for p in net.parameters():
        p.grad.mul_(min(1.0, most / (total ** 0.5 + 1e-6)))  # here
"""


@pytest.mark.parametrize(("made", "idiom"), [("(g * g).sum()", CLIP), ("g.mean()", PYTHON_LOOP)])
def test_what_such_functions_measure_of_gradients_makes_norms(made: str, idiom: str):
    assert of_marked(SCALED.format(made), "main") == (idiom,)
