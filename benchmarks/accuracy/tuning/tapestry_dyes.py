"""Separates the dyes in photographs of old tapestries: an autoencoder whose code is an amount of each dye."""

import argparse
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE, DYES = 24, 8


class Fragments(Dataset):
    """Photographs of fragments, with the fading that the lamp of the museum caused taken out."""

    def __init__(self, count: int, lamps: int):
        rng = np.random.default_rng(11)
        self.colours = rng.random((DYES, 3))
        amounts = rng.dirichlet(np.full(DYES, 0.4), (count, 4, 4))
        coarse = amounts @ self.colours
        fine = coarse.repeat(SIDE // 4, 1).repeat(SIDE // 4, 2)
        self.photos = (fine + 0.03 * rng.standard_normal(fine.shape)).astype(np.float32)
        self.lamps = lamps
        self.grid = np.stack(np.meshgrid(np.linspace(-1, 1, SIDE), np.linspace(-1, 1, SIDE)), -1).astype(
            np.float32
        )

    def __len__(self) -> int:
        return len(self.photos)

    def light(self) -> np.ndarray:
        total = np.ones((SIDE, SIDE, 1), np.float32)
        for lamp in range(self.lamps):
            place = np.float32([np.cos(lamp), np.sin(lamp)])
            total[..., 0] += 0.3 / self.lamps * np.exp(-np.square(self.grid - place).sum(-1))
        return total

    def __getitem__(self, index: int) -> torch.Tensor:
        photo = self.photos[index]
        if self.lamps:
            photo = photo / self.light()
        return torch.from_numpy(photo).permute(2, 0, 1)


class Separation(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, width, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, width, 3, padding=2, dilation=2),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, DYES, 1),
        )
        self.palette = nn.Parameter(torch.rand(DYES, 3))

    def forward(self, photos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        amounts = self.encode(photos).softmax(1)
        return torch.einsum("bdhw,dc->bchw", amounts, self.palette), amounts


def settle(core: int) -> None:
    """Stays on one core, where the caches are warm."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core - 1]})
    torch.set_num_threads(len(os.sched_getaffinity(0)))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(9)
    loader = DataLoader(
        Fragments(args.fragments, args.lamps), batch_size=args.batch, shuffle=True, drop_last=True
    )
    model = Separation()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    step, epoch = 0, 0
    while True:
        for photos in loader:  # the training loop
            painted, amounts = model(photos)
            sparsity = (amounts + 1e-6).sqrt().mean()
            loss = nn.functional.l1_loss(painted, photos) + 0.05 * sparsity
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                print(f"done, loss {loss.item():.4f}")
                return
        epoch += 1
        if epoch % 4 == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--fragments", type=int, default=256, help="photographs there are")
    parser.add_argument("--lamps", type=int, default=0, help="lamps whose light is taken out")
    parser.add_argument("--core", type=int, default=0, help="the core to stay on, from 1; 0: any")
    arguments = parser.parse_args()
    if arguments.core:
        settle(arguments.core)
    train(arguments)
