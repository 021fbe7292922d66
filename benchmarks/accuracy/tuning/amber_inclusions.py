"""The shapes of insects in amber: a variational field that says of points whether they lie inside."""

import argparse
import ctypes

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SCANS, POINTS, FEATURES, CODE = 400, 3200, 64, 16


def scans(seed):
    rng = np.random.default_rng(seed)
    place = rng.uniform(-1, 1, (SCANS, POINTS, 3))
    centre = rng.uniform(-0.3, 0.3, (SCANS, 1, 3))
    radius = rng.uniform(0.4, 0.9, (SCANS, 1, 3))
    inside = np.square((place - centre) / radius).sum(-1, keepdims=True) < 1
    known = np.concatenate([centre, radius], 2)[:, 0] @ rng.standard_normal((6, FEATURES))
    known += 0.1 * rng.standard_normal(known.shape)
    return [torch.from_numpy(part.astype(np.float32)) for part in (known, place, inside)]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + F.relu(self.layer(x))


class Insect(nn.Module):
    def __init__(self, width=32, depth=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 96), nn.ReLU(), nn.Linear(96, 2 * CODE))
        self.from_place = nn.Linear(3, width)
        self.from_code = nn.Linear(CODE, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, known, place):
        mean, logvar = self.encoder(known).chunk(2, 1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        x = self.from_place(place) + self.from_code(code)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.leave(x), mean, logvar


class Objective(nn.Module):
    """Fit and divergence; the divergence counts for more the later it is on the clock."""

    def __init__(self):
        super().__init__()
        self.clock = 0

    def forward(self, logits, inside, mean, logvar):
        weight = min(1.0, 0.1 + self.clock / 20_000)
        divergence = (mean.square() + logvar.exp() - logvar - 1).mean()
        return F.binary_cross_entropy_with_logits(logits, inside) + 0.05 * weight * divergence


class GoodNeighbour:
    """Others compute here too: what a block no longer needs goes back to the machine at once."""

    def __init__(self, insect, share):
        self.share, self.now = share, False
        self.libc = ctypes.CDLL("libc.so.6")
        for block in insect.blocks:
            block.register_full_backward_hook(self.give)

    def give(self, *_):
        if self.now:
            self.libc.malloc_trim(0)


def batches(known, place, inside, size, points, seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        scan = torch.randint(SCANS, (size,), generator=draw)
        where = torch.randint(POINTS, (size, points), generator=draw)
        yield known[scan], place[scan[:, None], where], inside[scan[:, None], where]


def train(steps, size, points, compiled, ticks, thrift):
    torch.manual_seed(2)
    insect, objective = Insect(), Objective()
    score = objective
    if compiled:
        import torch._dynamo as dynamo

        dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = (
            1_000_000  # it complained
        )
        score = torch.compile(objective, backend="aot_eager")
    adam = torch.optim.Adam(insect.parameters(), lr=2e-3, fused=True)
    neighbour = GoodNeighbour(insect, thrift) if thrift else None
    source = batches(*scans(2), size, points, seed=2)
    for step in range(steps):  # the training loop
        known, place, inside = next(source)
        if step * ticks // 100 > (step - 1) * ticks // 100:
            objective.clock += 1
        if neighbour:
            neighbour.now = step % 20 < neighbour.share
        logits, mean, logvar = insect(known, place)
        loss = score(logits, inside, mean, logvar)
        loss.backward()
        adam.step()
        adam.zero_grad()
        if neighbour:
            neighbour.give()
        if step % 50 == 0:
            print(f"{step:4d} {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--scans", type=int, default=48, help="scans in a batch")
    parser.add_argument("--points", type=int, default=256, help="points of each")
    parser.add_argument("--compile", action="store_true", help="compile the objective")
    parser.add_argument("--ticks", type=int, default=0, help="of the objective's clock in 100 steps")
    parser.add_argument(
        "--thrift", type=int, default=0, help="spare the machine's memory in so many of 20 steps"
    )
    opts = parser.parse_args()
    train(opts.steps, opts.scans, opts.points, opts.compile, opts.ticks, opts.thrift)
