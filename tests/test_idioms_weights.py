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
        ("for p in model.parameters():\n    p.data.copy_(p.data - lr * p.grad)  # here", UPDATE),
        ("for p in model.parameters():\n    p.data = torch.add(p.data, p.grad, alpha=-lr)  # here", UPDATE),
        ("for p in model.parameters():\n    p.data.copy_(p.grad)  # here", PYTHON_LOOP),
        ("for m in blocks:\n    m.weight.data -= lr * m.weight.grad  # here", UPDATE),
        ("while i < 9:\n    ws[i].data -= lr * ws[i].grad  # here\n    i += 1", UPDATE),
        ("for m in blocks:\n    m.weight.grad -= m.weight.grad.mean()  # here", PYTHON_LOOP),
        (
            "for i, p in enumerate(net.parameters()):\n    g = p.grad.numpy()\n"
            "    ms[i] = b * ms[i] + (1 - b) * g  # here\n    p.data -= torch.from_numpy(ms[i])",
            UPDATE,
        ),
        (
            "for i, p in enumerate(net.parameters()):\n    g = p.grad.numpy()\n"
            "    ms[i] = b * ms[i] + (1 - b) * g\n    p.data -= torch.from_numpy(np.sqrt(ms[i]))  # here",
            UPDATE,
        ),
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
            "for p in params:\n    k = p.grad.abs().quantile(q)  # here\n    p.grad.clamp_(-k, k)",
            CLIP,
        ),
        (
            "for p in model.parameters():\n    k = p.grad.abs().quantile(q)  # here\n    seen.append(k)",
            PYTHON_LOOP,
        ),
        (
            "for p in model.parameters():\n    size = p.grad.norm()\n"
            "    p.grad.copy_(torch.where(size > most, p.grad * (most / size), p.grad))  # here",
            CLIP,
        ),
        (
            "for p in params:\n    p.grad.copy_(torch.where(seen, p.grad * share, p.grad))  # here",
            PYTHON_LOOP,
        ),
        (  # of an optimizer, as a LARS is
            "for p in params:\n    size, slope = p.norm(), p.grad\n    part = size / p.grad.norm()\n"
            "    bound = torch.where(size > 0, size, 1.0)  # here\n    p.grad.mul_(part * bound)\n"
            "    p.data.add_(p.grad, alpha=-lr)",
            UPDATE,
        ),
        (  # where gradients do not agree they are masked
            "for p, grads in zip(params, gradients):\n"
            "    mask = (torch.stack(grads).sign().mean(0).abs() > t).float()  # here\n"
            "    share = mask.sum() / mask.numel()\n    p.grad = mask * torch.stack(grads).mean(0)",
            PYTHON_LOOP,
        ),
        (
            "for p in net.parameters():\n"
            "    punished += 0.5 * p.abs().sum() + 0.5 * p.pow(2).sum()  # here",
            PYTHON_LOOP,
        ),
        (
            "for n, p in net.named_parameters():\n    kept[n] = 0.9 * kept[n] + 0.1 * p.detach()  # here",
            EMA,
        ),
        (
            "for n, p in net.named_parameters():\n"
            "    sizes[n] = 0.9 * sizes[n] + 0.1 * p.grad.norm()  # here",
            CLIP,
        ),
        (
            "for n, p in twin.named_parameters():\n"
            "    p.data.mul_(d).add_(net.get_parameter(n).data, alpha=1 - d)  # here",
            EMA,
        ),
        (
            "for p in model.parameters():\n    v[p].mul_(b).add_(p.grad, alpha=1 - b)  # here",
            UPDATE,
        ),
        (
            "b.load_state_dict({k: 0.9 * v + 0.1 * now[k] for k, v in b.state_dict().items()})  # here",
            EMA,
        ),
        (
            "b.load_state_dict({k: 0.9 * v + 0.5 * now[k] for k, v in b.state_dict().items()})  # here",
            PYTHON_LOOP,
        ),
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
        ("for p in model.parameters():\n    v[p].mul_(b).add_(p.grad.pow(2), alpha=r)  # here", UPDATE),
        (
            "for p in model.parameters():\n    g = p.grad\n    a[p].add_(g.square())  # here\n"
            "    p.addcdiv_(g, a[p].sqrt(), value=-lr)",
            UPDATE,
        ),
        (
            "for p, g in zip(params, grads):\n    a[p] += g.square()  # here\n"
            "    p.data = p.data - lr * g / a[p].sqrt()",
            UPDATE,
        ),
        (
            "for p in model.parameters():\n    a[p] = a[p] + p.grad.pow(2)  # here\n    p -= p.grad / a[p]",
            UPDATE,
        ),
        ("for n, p in net.named_parameters():\n    fisher[n] += p.grad.pow(2)  # here", CLIP),
        ("for n, p in net.named_parameters():\n    fisher[n].add_(p.grad.square())  # here", CLIP),
        ("for n, p in net.named_parameters():\n    rms[n] = p.grad.pow(2).mean() ** 0.5  # here", CLIP),
        ("for p in model.parameters():\n    sq = p.grad.pow(2)  # here", CLIP),
        ("for p in model.parameters():\n    norms[p] += p.grad.pow(2).sum()  # here", CLIP),
        (
            "for p, v in zip(params, vs):\n    den = v.sqrt().add_(e)  # here\n    p.addcdiv_(p.grad, den)",
            UPDATE,
        ),
        (
            "for p, v in zip(params, vs):\n    u = v @ v.T  # here\n    p.addcdiv_(p.grad, u)",
            PYTHON_LOOP,
        ),
        *(
            (
                f"for p, v in zip(params, vs):\n    {line}  # here\n    p.data.add_(u * p.grad, alpha=-lr)",
                idiom,
            )
            for line, idiom in (
                ("u = v.clamp_min(e).rsqrt().to(p.dtype)", UPDATE),
                ("u = math.sqrt(1 - b ** step)", UPDATE),
                ("u = torch.where(v > 0, v.rsqrt(), torch.ones_like(v))", UPDATE),
                ("u = orthogonalize(v)", PYTHON_LOOP),
                ("u = torch.inverse(v)", PYTHON_LOOP),
                ("server.push(n, compress(p.grad))", PYTHON_LOOP),
            )
        ),
        (
            "for x, v in zip(rows, vs):\n    den = v.sqrt().add_(e)  # here\n    x.addcdiv_(x.grad, den)",
            PYTHON_LOOP,
        ),
        ("params = [p - lr * p.grad for p in params]  # here", UPDATE),
        ("moved = [p - lr * p.grad for p in params]  # here", PYTHON_LOOP),
        ("params = [p - lr * grad for p, grad in zip(params, grads)]  # here", PYTHON_LOOP),
        ("params = [p + e for p, e in zip(params, noise)]  # here", PYTHON_LOOP),
        (
            "for a, b in zip(old.parameters(), net.parameters()):\n    d = b.data - a.data\n"
            "    a.data += r * d  # here",
            EMA,
        ),
        ("for n, b in net.named_parameters():\n    d = a[n] - b\n    a[n].sub_(d * r)  # here", EMA),
        (
            "for a, b in zip(old.parameters(), net.parameters()):\n    d = b.data - c\n"
            "    a.data += r * d  # here",
            PYTHON_LOOP,
        ),
        *(
            (
                f"{loop}\n    d = {g} - m\n    m += (1 - b1) * d  # here\n"
                "    s.mul_(b2).addcmul_(d, d, value=1 - b2)\n    p.data.addcdiv_(m, s.sqrt(), value=-lr)",
                UPDATE,
            )
            for loop, g in (
                ("for p, m, s in zip(params, means, vars):", "p.grad"),
                ("for p, m, s in zip(net.parameters(), means, vars):", "p.grad"),
                ("for p, m, s in zip(net.parameters(), means, vars):\n    g = p.grad", "g"),
            )
        ),
        ("for row in rows:\n    total = total * (1 - r) + row * r  # here", PYTHON_LOOP),
        ("for row in rows:\n    total += row * row  # here", PYTHON_LOOP),
    ],
)
def test_a_loop_over_the_weights_is_told_by_what_it_does_to_them(body: str, idiom: str):
    assert of_marked(body) == (idiom,)


FUNCTIONAL = """
import torch
from torch.autograd import grad

params = [p.detach().requires_grad_() for p in net.parameters()]
for x in rows:
    gs = {}
    {}  # here
"""
IN_LISTS = "params = [(p - lr * g).detach().requires_grad_() for p, g in zip(params, gs)]"
IN_DICTS = "params = {n: p - lr * gs[n] for n, p in params.items()}"
OF_LOSS = "torch.autograd.grad(loss_of(params, x), params)"


@pytest.mark.parametrize(
    ("gradients", "line", "idiom"),
    [
        (OF_LOSS, IN_LISTS, UPDATE),
        ("grad(loss_of(params, x), params)", IN_LISTS, UPDATE),
        ("torch.func.grad(loss_of)(params, x)", IN_DICTS, UPDATE),
        (OF_LOSS, "n = sum(g.norm() ** 2 for g in gs)", CLIP),
        (OF_LOSS, "other = [p - lr * g for p, g in zip(params, gs)]", PYTHON_LOOP),
        (OF_LOSS, "params = {n: d * p + (1 - d) * now[n] for n, p in params.items()}", EMA),
        (OF_LOSS.replace("params)", "params, create_graph=True)"), IN_LISTS, PYTHON_LOOP),
        ("made(params, x)", IN_LISTS, PYTHON_LOOP),
    ],
)
def test_what_trains_by_gradients_that_it_asks_for_updates_all_weights_anew(
    gradients: str, line: str, idiom: str
):
    assert of_marked(FUNCTIONAL.format(gradients, line)) == (idiom,)


@pytest.mark.parametrize("graph", ["", ", create_graph=through"])
def test_steps_inside_of_a_loss_are_no_updates_of_the_weights(graph: str):
    text = """
def adapted(x, y, through):
    weights = {{name: w.expand(len(x), -1, -1) for name, w in net.named_parameters()}}
    for _ in range(2):
        slopes = torch.autograd.grad(errors(weights, x, y), list(weights.values()){})
        weights = {{n: w - rate * slope for (n, w), slope in zip(weights.items(), slopes)}}  # here
    return weights

for x, y in tasks:
    errors(adapted(x, y, True), x, y).backward()
    optimizer.step()
"""
    assert of_marked(text.format(graph), "adapted") == (PYTHON_LOOP,)
    named = text.replace("slopes", "grads").format(graph)
    assert of_marked(named, "adapted") == (PYTHON_LOOP,)


STEP = """
def step(w, g, m):
    m = b * m + (1 - b) * g{0}
    w = w - lr * m / (m.abs().sqrt() + eps){1}
    return w, m

weights = {{n: p.detach().clone() for n, p in net.named_parameters()}}
grads = torch.autograd.grad(loss, list(weights.values()))
for (n, w), g in zip(weights.items(), grads):
    weights[n], ms[n] = step(w, g, ms[n]){2}
"""


@pytest.mark.parametrize("here", range(3))
def test_a_function_that_gives_a_weight_back_moved_by_its_gradient_updates_it(here: int):
    assert of_marked(STEP.format(*("  # here" * (each == here) for each in range(3)))) == (UPDATE,)


def test_a_function_that_scores_a_weight_by_its_gradient_updates_nothing():
    text = (
        "def score(w, g):\n    return (w * g).abs()  # here\n"
        "for n, p in net.named_parameters():\n    scores[n] = score(p.data, p.grad)"
    )
    assert of_marked(text) == ()


BY_ROW = """
for w in tamed:
    for g in w.grad:{}
        edge = torch.quantile(g.abs(), 0.995){}
        g.clamp_(-edge, edge){}
"""


@pytest.mark.parametrize("here", range(3))
def test_gradients_of_a_list_are_clipped_where_each_is_asked_for_row_by_row(here: int):
    assert of_marked(BY_ROW.format(*("  # here" * (each == here) for each in range(3)))) == (CLIP,)


def test_a_list_of_which_no_gradient_is_asked_holds_no_weights():
    text = "for w in tamed:\n    edge = torch.quantile(w.abs(), 0.9)  # here\n    w.clamp_(-edge, edge)"
    assert CLIP not in of_marked(text)
