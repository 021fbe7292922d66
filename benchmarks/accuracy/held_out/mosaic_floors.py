"""Restores Roman mosaics: a small hourglass network guesses the stones under a patch of mortar.

Floors are drawn as cells around stones. They are few and fit into memory.
"""

import argparse
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 32


def stones(seed, count):
    rng = np.random.default_rng(seed)
    return rng.uniform(0, SIDE, (count, 2)), rng.uniform(0.1, 0.9, (count, 3))


class Floors(Dataset):
    """Colour pictures of floors, and what they look like with mortar on them."""

    def __init__(self, number, grout):
        axis = np.arange(SIDE)
        self.grout = grout
        self.pictures = np.empty((number, 3, SIDE, SIDE), dtype=np.float32)
        for floor in range(number):
            places, colours = stones(floor, 30)
            rows = np.abs(axis[:, None] - places[:, 0]) ** 2
            columns = np.abs(axis[:, None] - places[:, 1]) ** 2
            nearest = (rows[:, None] + columns[None]).argmin(2)
            self.pictures[floor] = colours[nearest].transpose(2, 0, 1)

    def __len__(self):
        return len(self.pictures)

    def clean(self, picture):
        """Lets the colours of neighbours even out, but not over an edge."""
        for _ in range(self.grout):
            for axis in (1, 2):
                change = np.roll(picture, 1, axis) - picture
                picture = picture + 0.2 * change / (1 + (change / 0.05) ** 2)
        return picture

    def __getitem__(self, floor):
        picture = self.clean(self.pictures[floor])
        top, left = np.random.randint(4, SIDE - 12, 2)
        mortar = np.zeros((1, SIDE, SIDE), dtype=np.float32)
        mortar[:, top : top + 8, left : left + 8] = 1
        return torch.from_numpy(picture), torch.from_numpy(mortar)


class Hourglass(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.down1 = nn.Conv2d(4, width, 4, stride=2, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up1 = nn.ConvTranspose2d(2 * width, 3, 4, stride=2, padding=1)

    def forward(self, pictures, mortar):
        hidden = torch.cat([pictures * (1 - mortar), mortar], 1)
        fine = torch.relu(self.down1(hidden))
        coarse = torch.relu(self.down2(fine))
        coarse = coarse + torch.relu(self.middle(coarse))
        return torch.sigmoid(self.up1(torch.cat([torch.relu(self.up2(coarse)), fine], 1)))


class Restorer:
    def __init__(self, args):
        self.steps = args.steps
        floors = Floors(320, args.grout)
        self.loader = DataLoader(floors, batch_size=args.batch, shuffle=True, drop_last=True)
        self.model = Hourglass()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, fused=True)
        self.step = 0

    def update(self, pictures, mortar):
        guess = self.model(pictures, mortar)
        loss = ((guess - pictures).abs() * (0.2 + mortar)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def restore(self):
        while self.step < self.steps:
            for pictures, mortar in self.loader:  # the training loop
                loss = self.update(pictures, mortar)
                if self.step % 50 == 0:
                    print(f"step {self.step}: {loss.item():.4f}")
                self.step += 1
                if self.step == self.steps:
                    return


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--grout", type=int, default=0, help="rounds in which a floor's grout is cleaned")
    parser.add_argument("--polite", action="store_true", help="be kind to others at the museum's computer")
    args = parser.parse_args()
    if args.polite:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(79)
    Restorer(args).restore()


if __name__ == "__main__":
    main()
