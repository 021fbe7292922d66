#!/usr/bin/env python3
"""The crumb of sourdough loaves, 32 by 32 pixels of a cut: a variational autoencoder of the holes."""

import argparse
import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

SIZE = 32


class Cuts(Dataset):
    """Bakes holes of the given loaf; `__getitem__` is a whole tray, so that it is cheap."""

    def __init__(self, trays, loaves):
        self.trays, self.loaves = trays, loaves
        self.y, self.x = np.mgrid[:SIZE, :SIZE].astype(np.float32)

    def __len__(self):
        return self.trays

    def __getitem__(self, tray):
        rng = np.random.default_rng(tray)
        crumb = np.zeros((self.loaves, SIZE, SIZE), np.float32)
        for _ in range(3):
            cy, cx = rng.uniform(0, SIZE, (2, self.loaves, 1, 1)).astype(np.float32)
            radius = rng.gamma(2.0, 2.0, (self.loaves, 1, 1)).astype(np.float32)
            crumb[(self.y - cy) ** 2 + (self.x - cx) ** 2 < radius**2] = 1
        return torch.from_numpy(crumb.reshape(self.loaves, -1))


class Coder(nn.Module):
    def __init__(self, width=256, latent=16):
        super().__init__()
        self.down = nn.Sequential(
            nn.Linear(SIZE * SIZE, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.mean, self.spread = nn.Linear(width, latent), nn.Linear(width, latent)
        self.up = nn.Sequential(
            nn.Linear(latent, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, SIZE * SIZE),
        )

    def forward(self, crumb):
        hidden = self.down(crumb)
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return self.up(code), mean, spread


def cost(crumb, made, mean, spread):
    missed = nn.functional.binary_cross_entropy_with_logits(made, crumb, reduction="sum")
    excess = 0.5 * torch.sum(mean.square() + spread.exp() - 1 - spread)
    return (missed + excess) / len(crumb)


def recorder(window):
    """Out of ten steps, records the last ones for the table at the end."""
    if not window:
        return contextlib.nullcontext(SimpleNamespace(step=lambda: None, key_averages=lambda: None))
    return profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=10 - window, warmup=0, active=window),
        record_shapes=True,
        with_stack=True,
        on_trace_ready=lambda _: None,
    )


def trays(args):
    """Trays without end; a pass goes through all of them."""
    loader = DataLoader(
        Cuts(max(1, 100 // args.passes), args.loaves),
        batch_size=None,
        shuffle=True,
        num_workers=2,
        persistent_workers=not args.new_shift,
        multiprocessing_context="fork",
    )
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--loaves", type=int, default=128, help="on a tray")
    parser.add_argument("--passes", type=int, default=1, help="passes over the trays in 100 steps")
    parser.add_argument("--new-shift", action="store_true", help="other bakers for the next pass")
    parser.add_argument(
        "--window", type=int, default=0, help="of 10 steps, how many to have in the table of operators"
    )
    args = parser.parse_args()

    torch.manual_seed(6)
    coder = Coder()
    optimizer = torch.optim.Adam(coder.parameters(), lr=1e-3, fused=True)
    with recorder(args.window) as record:
        for step, crumb in enumerate(itertools.islice(trays(args), args.steps)):  # the training loop
            loss = cost(crumb, *coder(crumb))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record.step()
            if step % 50 == 0:
                print(f"{step:4d} {loss.item():8.2f}")
    if args.window:
        print(record.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))


if __name__ == "__main__":
    main()
