"""Learns one time step of a molten nitrate: where each atom goes, from its neighbours and from far away."""

from __future__ import annotations

import argparse
import logging
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger("melt")

BOX = 14.0
SPECIES = 4  # K, Na, N, O
CONFIG = {
    "steps": 200,
    "frames": 48,  # snapshots of the melt held in memory
    "batch": 4,  # snapshots in a batch
    "atoms": 160,
    "neighbours": 14,
    "width": 64,
    "blocks": 3,
    "waves": 64,  # wave vectors of the long-range part
    "pushes": 64,  # width of the part that turns pairs into pushes
    "surroundings": 128,  # width of the pretrained part
    "bonds": 0,  # N-O bonds held to their length
    "jit": "",  # what is compiled: radial, all
    "trainable": 0,  # leave the pretrained part as it was loaded
    "exact": 0,  # pushes in double precision: they are differences of large numbers
    "strict": 0,
    "talkative": 0,
    "cooling": 0.0,  # stages per step
}


class Melt(NamedTuple):
    """Snapshots: positions, what each atom is, its neighbours, and where it is one step later."""

    places: Tensor  # frames, atoms, 3
    kinds: Tensor  # frames, atoms
    near: Tensor  # frames, atoms, neighbours
    moves: Tensor  # frames, atoms, 3

    def batch(self, rows: Tensor) -> Melt:
        return Melt(*(part[rows] for part in self))


def wrap(delta: Tensor) -> Tensor:
    return delta - BOX * torch.round(delta / BOX)


def simulate(cfg: dict, rng: torch.Generator) -> Melt:
    shape = cfg["frames"], cfg["atoms"]
    places = torch.rand(*shape, 3, generator=rng) * BOX
    kinds = torch.randint(0, SPECIES, shape, generator=rng)
    charge = torch.tensor([1.0, 1.0, 0.7, -0.9])[kinds]
    near, moves = [], []
    for frame, q in zip(places, charge, strict=True):
        delta = wrap(frame[:, None] - frame[None])
        distance = delta.norm(dim=-1).fill_diagonal_(torch.inf)
        near.append(distance.topk(cfg["neighbours"], largest=False).indices)
        push = q[:, None, None] * q[None, :, None] * delta / (distance**2 + 1)[..., None]
        moves.append(push.nan_to_num().sum(1) * 0.05)
    return Melt(places, kinds, torch.stack(near), torch.stack(moves))


def wave_vectors(count: int) -> np.ndarray:
    """The shortest wave vectors that fit into the box, one of each opposite pair."""
    side = np.arange(-6, 7)
    grid = np.stack(np.meshgrid(side, side, side, indexing="ij"), -1).reshape(-1, 3)
    grid = grid[len(grid) // 2 + 1 :]
    return 2 * np.pi / BOX * grid[np.argsort((grid**2).sum(1), kind="stable")][:count]


def dense(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class FarField(nn.Module):
    """The potential of all charges in the periodic box, wave by wave, each with a weight of its own."""

    def __init__(self, waves: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.from_numpy(waves).float())
        self.weights = nn.Parameter(1 / self.vectors.square().sum(1))

    def forward(self, places: Tensor, charges: Tensor) -> Tensor:
        phase = places @ self.vectors.T
        waves = torch.cat([phase.cos(), phase.sin()], -1)
        density = torch.einsum("bnw,bn->bw", waves, charges)
        potential = torch.einsum("bnw,bw->bn", waves, density * self.weights.repeat(2))
        return potential / len(self.vectors)


class Radial(nn.Module):
    """A distance as a row of Gaussians, which become sharper from stage to stage."""

    def __init__(self, count: int, furthest: float) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0.2, furthest, count))
        self.stage = 0

    def forward(self, distance: Tensor) -> Tensor:
        sharpness = 2.0 * 1.01**self.stage
        return torch.exp(-sharpness * (distance[..., None] - self.centres).square())


class Exchange(nn.Module):
    """Atoms tell their neighbours about themselves."""

    def __init__(self, width: int, talks: bool) -> None:
        super().__init__()
        self.filter = dense(16, width, width)
        self.update = dense(width, width, width)
        self.talks = talks

    def forward(self, h: Tensor, radial: Tensor, near: Tensor) -> Tensor:
        told = (h[near] * self.filter(radial)).sum(1)
        if self.talks:
            log.debug("told %s of %s", tuple(told.shape), tuple(h.shape))
        return h + self.update(told)


class Network(nn.Module):
    def __init__(self, cfg: dict) -> None:
        super().__init__()
        width = cfg["width"]
        self.kinds = nn.Embedding(SPECIES, width)
        self.charge = nn.Embedding(SPECIES, 1)
        self.surroundings = dense(cfg["neighbours"], cfg["surroundings"], cfg["surroundings"], width)
        self.far = FarField(wave_vectors(cfg["waves"]))
        self.blocks = nn.ModuleList(Exchange(width, k < cfg["talkative"]) for k in range(cfg["blocks"]))
        self.strength = dense(width + 17, cfg["pushes"], cfg["pushes"], 1)
        if cfg["exact"]:
            self.strength.double()
        self.radial = Radial(16, 6.0)

    def forward(self, melt: Melt) -> Tensor:
        places = melt.places.flatten(0, 1)
        count = melt.places.shape[1]
        first = torch.arange(0, len(places), count, device=places.device)
        near = (melt.near + first[:, None, None]).flatten(0, 1)
        delta = wrap(places[:, None] - places[near])
        distance = delta.norm(dim=-1)
        radial = self.radial(distance)
        h = self.kinds(melt.kinds.flatten()) + self.surroundings(distance)
        potential = self.far(melt.places, self.charge(melt.kinds).squeeze(-1)).flatten()
        for block in self.blocks:
            h = block(h, radial, near)
        pair = torch.cat([h[near], radial, (potential[:, None] - potential[near])[..., None]], -1)
        push = self.strength(pair.to(self.strength[0].weight.dtype)).float() * delta / distance[..., None]
        return push.sum(1).unflatten(0, (-1, count))


def stretch(places: Tensor, bonds: list[tuple[int, int, float]]) -> Tensor:
    """Bonds are stiff: they keep their length, wherever the atoms go."""
    return sum(
        ((places[:, a] - places[:, b]).norm(dim=-1) - length).square().mean() for a, b, length in bonds
    )


def bond_list(cfg: dict, rng: torch.Generator) -> list[tuple[int, int, float]]:
    ends = torch.randint(0, cfg["atoms"] - 1, (cfg["bonds"],), generator=rng).tolist()
    return [(a, a + 1, 1.25) for a in ends]


def load_pretrained(net: Network, cfg: dict) -> None:
    """The part that describes surroundings comes from elsewhere; the optimizer does not get it."""
    elsewhere = dense(cfg["neighbours"], cfg["surroundings"], cfg["surroundings"], cfg["width"])
    net.surroundings.load_state_dict(elsewhere.state_dict())
    if not cfg["trainable"]:
        net.surroundings.requires_grad_(False)


def train(cfg: dict) -> float:
    torch.manual_seed(5)
    rng = torch.Generator().manual_seed(5)
    melt = simulate(cfg, rng)
    bonds = bond_list(cfg, rng)
    net = Network(cfg)
    load_pretrained(net, cfg)
    if cfg["jit"]:
        torch._dynamo.config.recompile_limit = 2000
        torch._dynamo.config.accumulated_recompile_limit = 2000
        part = net if cfg["jit"] == "all" else net.get_submodule(cfg["jit"])
        part.compile(backend="aot_eager")
    ours = [p for name, p in net.named_parameters() if not name.startswith("surroundings.")]
    optimizer = torch.optim.Adam(ours, lr=2e-3, fused=True)
    mean = torch.zeros(())
    for step in range(cfg["steps"]):  # the training loop
        batch = melt.batch(torch.randint(0, cfg["frames"], (cfg["batch"],), generator=rng))
        net.radial.stage = int(step * cfg["cooling"])
        moves = net(batch)
        loss = nn.functional.smooth_l1_loss(moves, batch.moves)
        if bonds:
            loss = loss + 0.01 * stretch(batch.places + moves, bonds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean.lerp_(loss.detach(), 0.05)
        if step % 100 == 99:
            print(f"{step + 1} steps: {mean.item():.4f}")
    return mean.item()


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=200)
    for name, value in CONFIG.items():
        if name != "steps":
            cli.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    cfg = vars(cli.parse_args())
    with ExitStack() as stack:
        if cfg["strict"]:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        train(cfg)


if __name__ == "__main__":
    main()
