"""Compresses photographs of floor mosaics, tile by tile, into 24 numbers with a convolutional VAE."""

import argparse
import os
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SIDE, CODE = 32, 24
PALETTE = np.array([[0.8, 0.7, 0.5], [0.5, 0.2, 0.15], [0.2, 0.25, 0.35], [0.9, 0.88, 0.82]], np.float32)


def lay_floor(count, rng):
    """Tiles of eight by eight stones; each tile prefers two of the colours."""
    favourites = rng.integers(0, 4, (count, 2))
    choice = (rng.random((count, 8, 8)) < 0.35).astype(np.int64)
    colours = PALETTE[np.take_along_axis(favourites, choice.reshape(count, -1), 1)]
    stones = colours.reshape(count, 8, 8, 3) + rng.normal(0, 0.05, (count, 8, 8, 3)).astype(np.float32)
    return stones.repeat(4, 1).repeat(4, 2).transpose(0, 3, 1, 2).copy()


class TileCoder(nn.Module):
    def __init__(self, wide=32):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, wide, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(wide, 2 * wide, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(2 * wide, 2 * wide, 4, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(2 * wide * 16, 2 * CODE),
        )
        self.decode = nn.Sequential(
            nn.Linear(CODE, 2 * wide * 16),
            nn.Unflatten(1, (2 * wide, 4, 4)),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * wide, 2 * wide, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * wide, wide, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(wide, 3, 4, 2, 1),
        )

    def forward(self, tiles):
        mean, log_var = self.encode(tiles).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(code), mean, log_var


def draw_joints(tiles, count, rng):
    """Old floors have cracks: short dark lines, anywhere."""
    for tile in tiles:
        for _ in range(count):
            y, x, long = rng.randrange(SIDE), rng.randrange(SIDE), rng.randrange(2, 7)
            if long % 2:
                tile[:, y, x : x + long] *= 0.97
            else:
                tile[:, y : y + long, x] *= 0.97
    return tiles


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiles", type=int, default=64, help="tiles that are seen at once")
    parser.add_argument("--cracks", type=int, default=0, help="cracks in each tile")
    parser.add_argument("--gallery", type=int, default=0, help="reconstructions that go with each state")
    args = parser.parse_args()

    import random

    torch.manual_seed(79)
    floor = lay_floor(4000, np.random.default_rng(79))
    chance = random.Random(79)
    coder = TileCoder()
    optimizer = torch.optim.Adam(coder.parameters(), lr=1e-3, fused=True)
    gallery = torch.zeros(args.gallery, 3, SIDE, SIDE)

    with tempfile.TemporaryDirectory() as folder:
        for step in range(args.steps):  # the training loop
            rows = np.random.randint(0, len(floor), args.tiles)
            tiles = floor[rows]
            if args.cracks:
                tiles = draw_joints(tiles, args.cracks, chance)
            tiles = torch.from_numpy(tiles)

            again, mean, log_var = coder(tiles)
            fit = F.mse_loss(again, tiles, reduction="sum") / len(tiles)
            rate = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
            loss = fit + 0.1 * rate
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            if args.gallery and step % 4 == 3:
                few = min(args.gallery, len(tiles))
                gallery[:few] = again.detach()[:few]
                state = {"step": step, "coder": coder.state_dict(), "gallery": gallery}
                torch.save(state, os.path.join(folder, f"floor-{step // 4 % 3}.pt"))
            if step % 50 == 0:
                print(f"{step:5d}  fit {fit.item():8.2f}  rate {rate.item():7.2f}")


if __name__ == "__main__":
    main()
