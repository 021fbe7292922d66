"""Tells quark, gluon and W jets apart from the set of their hardest particles."""

import argparse
import math
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F

FEATURES, CLASSES = 7, 3


@dataclass
class Config:
    steps: int = 200
    jets: int = 800
    particles: int = 40
    batch: int = 40
    width: int = 64
    heads: int = 8
    layers: int = 4
    rate: float = 1e-3
    knots: int = 0
    explicit_attention: bool = False
    averages: int = 0
    pileup: int = 0


def parse_config():
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Config):
        option = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(field.default), default=field.default)
    return Config(**vars(parser.parse_args()))


def simulate(cfg, rng, amount):
    """Makes jets: log pt, eta, phi, log energy, charge and two impact parameters of each particle."""
    kind = rng.integers(CLASSES, size=amount)
    shape = (amount, cfg.particles)
    log_pt = rng.exponential(1.0, shape) * np.where(kind == 1, 0.6, 1.0)[:, None]
    spread = np.where(kind == 1, 0.25, 0.12)[:, None]
    prong = np.where(kind == 2, 0.3, 0.0)[:, None] * rng.choice([-1.0, 1.0], shape)
    eta = spread * rng.normal(size=shape) + prong
    phi = spread * rng.normal(size=shape)
    log_energy = log_pt + np.log(np.cosh(eta))
    charge = rng.integers(-1, 2, shape)
    impact = rng.normal(size=(*shape, 2)) * 0.1
    jets = np.stack([log_pt, eta, phi, log_energy, charge, impact[..., 0], impact[..., 1]], axis=-1)
    return jets.astype(np.float32), torch.from_numpy(kind)


def simulate_vertices(rng, amount=500, particles=3):
    """Makes the soft particles of other collisions in the same bunch crossing."""
    vertices = rng.normal(size=(amount, particles, FEATURES)) * 0.5
    vertices[..., 0] = rng.exponential(0.15, (amount, particles))
    return vertices.astype(np.float32)


def overlay(cfg, jets, vertices, rng):
    """Draws other collisions for every jet; their particles take the places of softer ones."""
    mixed = jets.copy()
    for jet in mixed:
        for vertex in vertices[rng.integers(len(vertices), size=cfg.pileup)]:
            slots = jet[:, 0].argsort()[: len(vertex)]
            harder = vertex[:, 0] > jet[slots, 0]
            jet[slots[harder]] = vertex[harder]
    return mixed


def batches(cfg, jets, kinds, vertices, rng):
    while True:
        mixed = torch.from_numpy(overlay(cfg, jets, vertices, rng) if cfg.pileup else jets)
        for rows in torch.randperm(len(kinds)).split(cfg.batch):
            yield mixed[rows], kinds[rows]


def init_params(cfg):
    params = {}

    def linear(name, into, out, gain=1.0):
        params[f"{name}.weight"] = torch.randn(out, into) * (gain / math.sqrt(into))
        params[f"{name}.bias"] = torch.zeros(out)

    def norm(name):
        params[f"{name}.weight"] = torch.ones(cfg.width)
        params[f"{name}.bias"] = torch.zeros(cfg.width)

    linear("embed", FEATURES, cfg.width)
    for layer in range(cfg.layers):
        norm(f"{layer}.before")
        linear(f"{layer}.qkv", cfg.width, 3 * cfg.width)
        linear(f"{layer}.mix", cfg.width, cfg.width, 0.5)
        norm(f"{layer}.between")
        linear(f"{layer}.up", cfg.width, 2 * cfg.width)
        linear(f"{layer}.down", 2 * cfg.width, cfg.width, 0.5)
    norm("last")
    linear("kind", cfg.width, CLASSES)
    if cfg.knots:
        params["knot.centre"] = torch.linspace(-2.0, 2.0, cfg.knots).repeat(FEATURES, 1)
        params["knot.sharpness"] = torch.full((FEATURES, cfg.knots), 1.5)
        params["knot.height"] = torch.randn(FEATURES, cfg.knots) * 0.1
    return {name: value.requires_grad_() for name, value in params.items()}


def apply_linear(params, name, x):
    return F.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


def apply_norm(params, name, x):
    return F.layer_norm(x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"])


def bend(params, cfg, x):
    """Passes each feature through a learnt curve, which is a sum of bumps."""
    centre, sharpness, height = (params[f"knot.{part}"] for part in ("centre", "sharpness", "height"))
    columns = []
    for feature in range(FEATURES):
        column = x[..., feature]
        curve = column
        for knot in range(cfg.knots):
            away = (column - centre[feature, knot]) * sharpness[feature, knot]
            curve = curve + height[feature, knot] * torch.exp(-(away**2))
        columns.append(curve)
    return torch.stack(columns, dim=-1)


def attend(params, cfg, layer, x):
    rows, particles, width = x.shape
    qkv = apply_linear(params, f"{layer}.qkv", x)
    q, k, v = qkv.view(rows, particles, 3, cfg.heads, width // cfg.heads).permute(2, 0, 3, 1, 4)
    if cfg.explicit_attention:
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // cfg.heads)
        mixed = torch.softmax(scores, dim=-1) @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v)
    return apply_linear(params, f"{layer}.mix", mixed.transpose(1, 2).reshape(rows, particles, width))


def classify(params, cfg, x):
    if cfg.knots:
        x = bend(params, cfg, x)
    x = apply_linear(params, "embed", x)
    for layer in range(cfg.layers):
        x = x + attend(params, cfg, layer, apply_norm(params, f"{layer}.before", x))
        hidden = apply_linear(params, f"{layer}.up", apply_norm(params, f"{layer}.between", x))
        x = x + apply_linear(params, f"{layer}.down", F.gelu(hidden))
    return apply_linear(params, "kind", apply_norm(params, "last", x.mean(1)))


def half_lives(cfg):
    """Half-lives of the averages in steps, from 5 to 500; the best is chosen at the end."""
    return [5.0 * 100.0 ** (number / max(1, cfg.averages - 1)) for number in range(cfg.averages)]


@torch.no_grad()
def follow(params, shadows):
    for half_life, shadow in shadows.items():
        decay = 0.5 ** (1.0 / half_life)
        for name, value in params.items():
            shadow[name] = decay * shadow[name] + (1.0 - decay) * value.detach()


@torch.no_grad()
def accuracy(params, cfg, jets, kinds):
    return (classify(params, cfg, jets).argmax(1) == kinds).float().mean().item()


def train(cfg):
    torch.manual_seed(11)
    rng = np.random.default_rng(11)
    jets, kinds = simulate(cfg, rng, cfg.jets)
    held_jets, held_kinds = simulate(cfg, rng, 80)
    held_jets = torch.from_numpy(held_jets)
    vertices = simulate_vertices(rng)
    params = init_params(cfg)
    shadows = {}
    for half_life in half_lives(cfg):
        shadows[half_life] = {name: value.detach().clone() for name, value in params.items()}
    optimizer = torch.optim.AdamW(list(params.values()), lr=cfg.rate, weight_decay=0.01, fused=True)

    feed = batches(cfg, jets, kinds, vertices, rng)
    for step, (x, kind) in enumerate(islice(feed, cfg.steps), 1):  # the training loop
        loss = F.cross_entropy(classify(params, cfg, x), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(params, shadows)
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")

    print(f"held-out accuracy {accuracy(params, cfg, held_jets, held_kinds):.3f}")
    scores = {life: accuracy(shadow, cfg, held_jets, held_kinds) for life, shadow in shadows.items()}
    if scores:
        best = max(scores, key=scores.get)
        print(f"best average: half-life {best:.0f} steps, accuracy {scores[best]:.3f}")


if __name__ == "__main__":
    train(parse_config())
