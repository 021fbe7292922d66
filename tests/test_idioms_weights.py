"""What a loop over a model's weights, or over states that were kept of it, is there for."""

from __future__ import annotations

import pytest

from diagnose.source.purposes import CLIP, EMA, PYTHON_LOOP, SCHEDULE, UPDATE
from tests.marked import of_marked


@pytest.mark.parametrize(
    ("body", "idiom"),
    [
        ("for p in model.parameters():\n    p.grad.clamp_(-1, 1)  # here", CLIP),
        ("for p in model.parameters():\n    n = p.grad.data.norm(2)  # here", CLIP),
        ("for p in model.parameters():\n    p.grad.mul_(clip_coef)  # here", CLIP),
        ("for p in model.parameters():\n    p.grad.div_(world_size)  # here", PYTHON_LOOP),
        ("for m, p in zip(master, ps):\n    m.grad.copy_(p.grad)  # here", PYTHON_LOOP),
        (
            "for a, b in zip(copy.parameters(), model.parameters()):\n    a.mul_(d).add_(b)  # here",
            EMA,
        ),
        ("for n, p in model.named_parameters():\n    shadow[n] = d * shadow[n] + (1 - d) * p  # here", EMA),
        ("for p in model.parameters():  # here\n    p.grad.clamp_(-1, 1)", CLIP),
        ("for a, b in zip(old.values(), model.state_dict().values()):  # here\n    a.mul_(d).add_(b)", EMA),
        ("for n, v in m.state_dict().items():\n    o[n].copy_(o[n] * (1 - r) + v * r)  # here", EMA),
        ("for n, v in m.state_dict().items():\n    o[n].lerp_(v, r)  # here", EMA),
        ("for n, v in m.state_dict().items():\n    o[n].copy_(o[n] * 2 + v * r)  # here", PYTHON_LOOP),
        ("for p in model.parameters():\n    p.data.add_(p.grad, alpha=-lr)  # here", UPDATE),
        ("for p in model.parameters():\n    p.data = p.data - lr * p.grad  # here", UPDATE),
        ("for p, g in zip(params, grads):\n    p -= lr * g  # here", UPDATE),
        ("for p in model.parameters():  # here\n    p -= lr * p.grad", UPDATE),
        ("for p in model.parameters():\n    p -= lr * p.grad; p.grad = None  # here", UPDATE),
        (
            "for p, m in zip(params, ms):\n    m.mul_(d).add_(p.grad)\n    p.add_(m, alpha=-lr)  # here",
            UPDATE,
        ),
        (
            "for p, v in zip(params, vs):\n    g = p.grad\n    v.mul_(d).addcmul_(g, g)  # here",
            UPDATE,
        ),
        (
            "for p, q in zip(params, old):\n    p -= lr * p.grad\n    q.mul_(d).add_(p)  # here",
            EMA,
        ),
        ("for p in model.parameters():\n    most += p.grad.abs().max()  # here", PYTHON_LOOP),
        ("for n, p in model.named_parameters():\n    kept[n] = p.grad.clone()  # here", PYTHON_LOOP),
        (
            "for g in grads:\n    for h in grads:\n        g -= (g @ h) * h / h.norm() ** 2  # here",
            PYTHON_LOOP,
        ),
        ("for p in model.parameters():\n    total += p.grad.norm() ** 2  # here", CLIP),
        ("for g in grads:\n    total += (g * g).sum()  # here", CLIP),
        ("for p in model.parameters():\n    p -= lr * p.grad / p.grad.norm()  # here", UPDATE),
        ("for a, b in zip(old.parameters(), rates):\n    groups[0].mul_(2)  # here", PYTHON_LOOP),
        ("for a, b in zip(kept.parameters(), m.parameters()):\n    a.copy_(b)  # here", PYTHON_LOOP),
        ("for a, b in zip(target.parameters(), m.parameters()):\n    a.copy_(b)  # here", EMA),
        ("for a, b in zip(old.parameters(), m.parameters()):\n    a.data = b.data  # here", PYTHON_LOOP),
        (
            "for a, b in zip(old.parameters(), m.parameters()):\n    a.data = d * b.data  # here",
            PYTHON_LOOP,
        ),
        (
            "for a, b in zip(old.parameters(), ps):\n    a.data = d * a.data + e * b.data  # here",
            EMA,
        ),
        (
            "for a, b in zip(old.parameters(), ps):\n    a.mul_(d)\n    a.add_(b, alpha=e)  # here",
            EMA,
        ),
        (
            "for a, b in zip(old.parameters(), ps):\n    a.data *= d  # here\n    a.data += b.data * e",
            EMA,
        ),
        ("for p, m in zip(model.parameters(), masks):\n    p.data.mul_(m)  # here", PYTHON_LOOP),
        ("for p, m in zip(model.parameters(), masks):\n    p.data *= m  # here", PYTHON_LOOP),
        ("for p, e in zip(model.parameters(), noise):\n    p.data.add_(e)  # here", PYTHON_LOOP),
        ("for p, q in zip(model.parameters(), old):\n    far += (p - q).norm() ** 2  # here", PYTHON_LOOP),
        (
            "for p, q in zip(model.parameters(), target):\n    far += (p - q).norm() ** 2  # here",
            PYTHON_LOOP,
        ),
        (
            "for p, q in zip(model.parameters(), target):\n    far = far + (p - q).norm()  # here",
            PYTHON_LOOP,
        ),
        ("for p in model.parameters():\n    p.grad.data *= clip_coef  # here", CLIP),
        ("for p in model.parameters():\n    p.grad = p.grad * clip_coef  # here", CLIP),
        ("for p in model.parameters():\n    p.grad = torch.clamp(p.grad, -1.0, 1.0)  # here", CLIP),
        ("for p in model.parameters():\n    p.grad.data = p.grad.data.clamp(-c, c)  # here", CLIP),
        ("for p in model.parameters():\n    g = p.grad\n    total += g.pow(2).sum()  # here", CLIP),
        ("for p in model.parameters():\n    g = p.grad\n    p.data.add_(g, alpha=-lr)  # here", UPDATE),
        ("for p in model.parameters():\n    torch.nn.utils.clip_grad_norm_(p, 1.0)  # here", CLIP),
        ("for p in model.parameters():\n    p.grad = p.grad * mask  # here", PYTHON_LOOP),
        ("for p, g in zip(params, grads):\n    n = g.norm()\n    g.mul_(far / n)  # here", CLIP),
        ("for p, g in zip(params, grads):\n    n = g.norm()\n    p.mul_(far / n)  # here", UPDATE),
        ("for p in model.parameters():\n    p.grad /= num_steps  # here", PYTHON_LOOP),
        (
            "for p in model.parameters():\n    p.grad = p.grad + max_norm * torch.randn_like(p)  # here",
            PYTHON_LOOP,
        ),
        (
            "for p in model.parameters():\n    v[p] = b * v[p] + (1 - b) * p.grad.pow(2)  # here",
            UPDATE,
        ),
        ("for c in cs:\n    protos[c] = m * protos[c] + (1 - m) * means[c]  # here", PYTHON_LOOP),
        ("for i, (a, b) in enumerate(zip(params, old)):\n    kept[i] = a + 1  # here", PYTHON_LOOP),
        ("for n, p in zip(names, state_dict()):\n    state[n] = p.clone()  # here", PYTHON_LOOP),
        ("for g, lr in zip(optimizer.param_groups, rates):\n    g['lr'] = lr  # here", SCHEDULE),
        ("for g in optimizer.param_groups:\n    g['weight_decay'] *= 0.5  # here", SCHEDULE),
        ("for g in optimizer.param_groups:\n    g['seen'] = step  # here", PYTHON_LOOP),
        ("for p in model.parameters():\n    a.add_(p.data - a, alpha=r)  # here", EMA),
        ("for p in model.parameters():\n    a.data += r * (p.data - a)  # here", EMA),
        ("for p in model.parameters():\n    a.sub_(r * (a - p))  # here", EMA),
        ("for p in model.parameters():\n    total += (p - a).abs().max()  # here", PYTHON_LOOP),
        ("for row in rows:\n    total = total * (1 - r) + row * r  # here", PYTHON_LOOP),
        ("for row in rows:\n    total += row * row  # here", PYTHON_LOOP),
    ],
)
def test_a_loop_over_the_weights_is_told_by_what_it_does_to_them(body: str, idiom: str):
    assert of_marked(body) == (idiom,)


KEPT = """
def __call__(self, *_):
    now = self.model.state_dict()
    self.kept = [
        {k: decay * old + (1 - decay) * now[k] for k, old in kept.items()}  # here
        for decay, kept in zip(self.decays, self.kept)
    ]
"""


def test_states_that_were_kept_of_a_model_are_averaged_too():
    assert of_marked(KEPT) == (EMA,)
    of_losses = KEPT.replace("self.model.state_dict()", "self.losses.mean()")
    assert of_marked(of_losses) == (PYTHON_LOOP,)


AVERAGES = """
def after_step(self, model):
    for decay, average in zip(self.decays, self.averaged):
        live, kept = model.state_dict(), average.state_dict(){}
        for name, value in live.items():{}
            if value.is_floating_point():{}
                kept[name] = decay * kept[name] + (1 - decay) * value{}
            else:
                kept[name] = value{}
        average.load_state_dict(kept){}
        best = model.state_dict(){}
"""


@pytest.mark.parametrize("place", range(7))
def test_what_gets_and_puts_back_the_states_that_are_averaged_is_a_part_of_that(place: int):
    marks = ["  # here" if number == place else "" for number in range(7)]
    assert of_marked(AVERAGES.format(*marks), "after_step") == ((EMA,) if place < 6 else (PYTHON_LOOP,))


def test_states_that_are_loaded_beside_no_average_are_none_of_one():
    loop = "for net in nets:\n    for v in old.values():\n        v.mul_(2)\n"
    assert of_marked(loop + "    net.load_state_dict(old)  # here") == (PYTHON_LOOP,)


def test_a_training_loop_that_also_averages_is_no_average_as_a_whole():
    text = """
for step in range(steps):
    kept = make(step)  # here
    loss(net(kept)).backward()
    optimizer.step()
    with torch.no_grad():
        old.weight.copy_(tau * net.weight + (1 - tau) * old.weight)
"""
    assert of_marked(text) == ()
