"""Restores garbled telegrams, letter by letter, with a two-way GRU."""

import argparse
import math
from dataclasses import dataclass
from typing import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F

NOTHING, ALPHABET = 0, 30


@dataclass
class Telegrams:
    """Telegrams, sorted into crates of about the same length."""

    batch: int
    frame: int
    seed: int = 31

    def __post_init__(self):
        self.dice = torch.Generator().manual_seed(self.seed)
        lengths = torch.randint(16, 49, (3000,), generator=self.dice).sort().values.tolist()
        self.sent = [self.compose(n) for n in lengths]
        self.crates = [range(i, i + self.batch) for i in range(0, len(lengths) - self.batch, self.batch)]

    def compose(self, n):
        words = torch.randint(1, ALPHABET, (3,), generator=self.dice)
        return words.repeat_interleave(math.ceil(n / 3))[:n]

    def crate(self, which):
        rows = [self.sent[i] for i in self.crates[which]]
        right = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=NOTHING)
        if right.shape[1] < self.frame:
            right = F.pad(right, (0, self.frame - right.shape[1]), value=NOTHING)
        noise = torch.randint(1, ALPHABET, right.shape, generator=self.dice)
        garbled = torch.where(
            (torch.rand(right.shape, generator=self.dice) < 0.2) & (right != NOTHING), noise, right
        )
        return garbled, right

    def forever(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            for which in torch.randperm(len(self.crates), generator=self.dice).tolist():
                yield self.crate(which)


class Restorer(nn.Module):
    def __init__(self, size=56):
        super().__init__()
        self.letters = nn.Embedding(ALPHABET, size, padding_idx=NOTHING)
        self.reader = nn.GRU(size, size, batch_first=True, bidirectional=True)
        self.writer = nn.Linear(2 * size, ALPHABET)

    def forward(self, garbled):
        return self.writer(self.reader(self.letters(garbled))[0])


class Operator:
    """Someone at the key: gets tired, and rests."""

    __slots__ = ("phase", "tired", "duty")

    def __init__(self, number):
        self.phase, self.tired, self.duty = 0.37 * number, 0.5, 1 + number % 3

    def serve(self, now):
        load = self.duty * (1 + math.sin(self.phase + 0.1 * now))
        self.tired += 0.05 * (load / 6 - self.tired)
        return self.tired


class Office:
    """All operators of the line. When they are tired, mistakes of the net count for less."""

    def __init__(self, operators):
        self.operators = [Operator(number) for number in range(operators)]

    def weight(self, now):
        if not self.operators:
            return 1.0
        total = 0.0
        for operator in self.operators:
            total += operator.serve(now)
        return 1.2 - 0.4 * total / len(self.operators)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--frame", type=int, default=0, help="letters that a form has room for")
    parser.add_argument("--operators", type=int, default=0, help="hundreds of operators on the line")
    args = parser.parse_args()

    torch.manual_seed(8)
    torch.set_num_threads(1)
    net = Restorer()
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, fused=True)
    office = Office(100 * args.operators)
    source = Telegrams(batch=20, frame=args.frame).forever()
    for now in range(args.steps):  # the training loop
        garbled, right = next(source)
        guess = net(garbled)
        loss = F.cross_entropy(guess.flatten(0, 1), right.flatten(), ignore_index=NOTHING)
        (loss * office.weight(now)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if now % 50 == 49:
            print(f"{now + 1} telegram crates, {loss.item():.3f} nats a letter")


if __name__ == "__main__":
    main()
