"""Reads signs on clay tablets: an encoder that someone else has trained, and a memory of signs that settles on one."""

import argparse

import numpy as np
import torch
from torch import nn

SIDE, SIGNS, CODE = 28, 20, 96


class Encoder(nn.Module):
    """Comes from another project. Stays as it is."""

    def __init__(self, depth):
        super().__init__()
        self.patches = nn.Conv2d(1, CODE, kernel_size=7, stride=7)
        self.layers = nn.ModuleList(nn.Linear(CODE, CODE) for _ in range(depth))

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        for layer in self.layers:
            x = x + 0.5 * torch.relu(layer(x))
        return x


class SignMemory(nn.Module):
    """Associative memory: thinks until its state hardly changes."""

    def __init__(self, rounds):
        super().__init__()
        self.enter = nn.Sequential(nn.LayerNorm(CODE), nn.Linear(CODE, 2 * CODE))
        self.recall = nn.Linear(2 * CODE, 2 * CODE, bias=False)
        nn.init.orthogonal_(self.recall.weight)
        self.name = nn.Linear(2 * CODE, SIGNS)
        self.rounds = rounds
        self.register_buffer("usual", torch.zeros(()))

    def forward(self, features):
        spread = features.detach().std()
        self.usual = torch.where(self.usual > 0, torch.lerp(self.usual, spread, 0.01), spread)
        contrast = spread / self.usual
        drive = self.enter(features.mean(1))
        with torch.no_grad():
            state = torch.tanh(drive)
            for _ in range(self.rounds):
                new = torch.tanh(drive + 0.5 * contrast * self.recall(state))
                moved = (new - state).abs().max()
                state = new
                if moved < 0.03:
                    break
        return self.name(torch.tanh(drive + 0.5 * self.recall(state)))


class Museum:
    """Photographs of tablets; a few boxes of them are from a night under a lamp from the side."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.shapes = (self.rng.random((SIGNS, SIDE, SIDE)) < 0.15).astype(np.float32)
        self.sign = self.rng.integers(0, SIGNS, 4000)
        self.photos = self.shapes[self.sign] + 0.2 * self.rng.standard_normal(
            (4000, SIDE, SIDE), dtype=np.float32
        )
        self.night = self.rng.integers(7, 36, 5000).cumsum()

    def scratch(self, images, scratches):
        """Marks of the spade, across some of the photographs."""
        for _ in range(scratches):
            which = self.rng.integers(len(images))
            (x, y), (u, v) = self.rng.uniform(0, SIDE - 1, (2, 2))
            along = np.linspace(0, 1, 40)
            across = (x + along * (u - x)).astype(int), (y + along * (v - y)).astype(int)
            images[which][across] = 0.5 * images[which][across] + 0.5
        return images

    def box(self, step, count, scratches):
        rows = self.rng.integers(0, len(self.photos), count)
        images = self.scratch(self.photos[rows], scratches)
        if step in self.night:
            images *= 9
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(self.sign[rows])


def build(args):
    torch.manual_seed(17)
    torch.set_num_threads(1)
    encoder = Encoder(args.encoder_depth)
    if not args.open_encoder:
        encoder.requires_grad_(False)
    memory = SignMemory(10 + args.ponder)
    return encoder, memory, torch.optim.Adam(memory.parameters(), lr=1e-3, fused=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--count", type=int, default=224, help="photographs in a step")
    parser.add_argument("--encoder-depth", type=int, default=6)
    parser.add_argument("--open-encoder", action="store_true", help="leave the encoder as it was delivered")
    parser.add_argument(
        "--scratches", type=int, default=0, help="scratches to put on each box of photographs"
    )
    parser.add_argument(
        "--ponder", type=int, default=0, help="further rounds for signs that are hard to settle on"
    )
    args = parser.parse_args()

    encoder, memory, optimizer = build(args)
    museum = Museum(23)
    loss_of = nn.CrossEntropyLoss()
    running = torch.zeros(())
    for step in range(args.steps):  # the training loop
        images, signs = museum.box(step, args.count, args.scratches)
        loss = loss_of(memory(encoder(images)), signs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running.lerp_(loss.detach(), 0.05)
        if (step + 1) % 50 == 0:
            print(f"{step + 1}: {running.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
