"""Codes for the wings of moths: a small head on a frozen network learns to know a specimen again.

Both views of a specimen are its descriptor with noise and gaps, so the frozen part has to run each time.
"""

import argparse
import itertools
import random
import threading

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

SPECIMENS, DIM = 2560, 256


class Cabinet(Dataset):
    """item = list of numbers -> descriptors of these specimens"""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        photographs = rng.standard_normal((4 * SPECIMENS, DIM))
        self.descriptors = torch.from_numpy(
            photographs.reshape(SPECIMENS, 4, DIM).mean(1).astype(np.float32) * 2
        )
        self.span = rng.gamma(9, 4, SPECIMENS).tolist()
        self.shade = rng.uniform(0, 100, SPECIMENS).tolist()

    def __len__(self):
        return SPECIMENS

    def __getitem__(self, numbers):
        return self.descriptors[numbers]


class Drawers(Sampler):
    """Lists of numbers. With `look`, neighbours in the order are unlike: the best of so many candidates."""

    def __init__(self, cabinet, batch, look, seed):
        self.cabinet, self.batch, self.look = cabinet, batch, look
        self.dice = random.Random(seed)

    def spread(self, rest):
        span, shade, roll = self.cabinet.span, self.cabinet.shade, self.dice.random
        order = [rest.pop()]
        while rest:
            a, b = span[order[-1]], shade[order[-1]]
            candidates = [int(roll() * len(rest)) for _ in range(self.look)]
            best = max(candidates, key=lambda i: (span[rest[i]] - a) ** 2 + (shade[rest[i]] - b) ** 2)
            rest[best], rest[-1] = rest[-1], rest[best]
            order.append(rest.pop())
        return order

    def __iter__(self):
        order = self.dice.sample(range(len(self.cabinet)), len(self.cabinet))
        if self.look:
            order = self.spread(order)
        for start in range(0, len(order) - self.batch + 1, self.batch):
            yield order[start : start + self.batch]

    def __len__(self):
        return len(self.cabinet) // self.batch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.wide, self.back = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.back(F.relu(self.wide(self.norm(x))))


def borrowed_network(blocks=10, thaw=0):
    """the museum's network (here: one like it), of which the last blocks may be thawed"""
    net = nn.Sequential(*[Block() for _ in range(blocks)])
    for block in net[: blocks - thaw]:
        block.requires_grad_(False)
    return net


class NoticeBoard(threading.Thread):
    """Sums up the catalogue for the screen in the hall."""

    def __init__(self, lines):
        super().__init__(daemon=True)
        self.lines, self.closed, self.sums = lines, threading.Event(), {}
        self.catalogue = [f"genus{n % 37};{20 + n % 61}.5;{1850 + n % 170}" for n in range(5000)]

    def run(self):
        while not self.closed.wait(0.02):
            sums = {}
            for n in range(self.lines):
                genus, span, year = self.catalogue[n % 5000].split(";")
                key = genus, int(year) // 10
                sums[key] = sums.get(key, 0.0) + float(span)
            self.sums = sums


def views(x):
    x = torch.cat([x, x])
    return F.dropout(x, 0.25) + 0.1 * torch.randn_like(x)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--candidates", type=int, default=0, help="seen for each place in an epoch's order")
    parser.add_argument("--thaw", type=int, default=0, help="blocks of the network to thaw, from its end")
    parser.add_argument("--notices", type=int, default=0, help="keep a board, from so many lines at a time")
    args = parser.parse_args()
    torch.manual_seed(31)

    cabinet = Cabinet(31)
    loader = DataLoader(cabinet, batch_size=None, sampler=Drawers(cabinet, args.batch, args.candidates, 31))
    trunk = borrowed_network(thaw=min(args.thaw, 10))
    head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 64))
    opt = torch.optim.AdamW(head.parameters(), lr=1e-3, fused=True)
    target = torch.arange(args.batch)
    board = None
    if args.notices:
        board = NoticeBoard(args.notices)
        board.start()

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, specimens in zip(range(args.steps), epochs):  # the training loop
        codes = F.normalize(head(trunk(views(specimens))), dim=1)
        one, other = codes.chunk(2)
        loss = F.cross_entropy(one @ other.T / 0.2, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 60 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    if board is not None:
        board.closed.set()
        board.join()


if __name__ == "__main__":
    main()
