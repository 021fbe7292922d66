"""Fills small sudokus: one transformer layer is applied again and again to its own guess.

The same layer runs six times in a forward pass, and the loss is of every guess on the way: this is the
model.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

CELLS, DIGITS = 36, 6


def squares(count):
    """Solved grids of six by six: one pattern with its digits, rows and columns changed about."""
    row, column = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    pattern = (row % 2 * 3 + row // 2 + column) % 6
    digits = torch.rand(count, DIGITS).argsort(1)
    bands = torch.rand(count, 3).argsort(1)
    rows = (bands[:, :, None] * 2 + torch.rand(count, 3, 2).argsort(2)).flatten(1)
    grids = pattern[rows].flatten(1)
    return digits.gather(1, grids)


class Refiner(nn.Module):
    def __init__(self, width=96, rounds=6):
        super().__init__()
        self.rounds = rounds
        self.clue = nn.Embedding(DIGITS + 1, width)
        self.cell = nn.Parameter(torch.randn(CELLS, width) * 0.02)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.read = nn.Linear(width, DIGITS)
        self.write = nn.Linear(DIGITS, width)

    def forward(self, clues):
        given = self.clue(clues) + self.cell
        state = given
        for _ in range(self.rounds):
            state = self.layer(state + given)
            guess = self.read(state)
            yield guess
            state = state + self.write(guess.softmax(2))


def batches(solutions, size):
    while True:
        solved = solutions[torch.randint(len(solutions), (size,))]
        hidden = torch.rand(solved.shape) < 0.5
        yield (solved + 1).masked_fill(hidden, 0), solved, hidden


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()
torch.manual_seed(6)
model = Refiner()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
running = torch.zeros(())
for step, (clues, solved, hidden) in enumerate(batches(squares(5000), 16), 1):  # the training loop
    loss = 0
    for guess in model(clues):
        loss = loss + F.cross_entropy(guess.flatten(0, 1), solved.flatten())
    loss = loss / model.rounds
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    running.lerp_(((guess.detach().argmax(2) == solved) & hidden).sum() / hidden.sum(), 0.02)
    if step % 50 == 0:
        print(f"{step}: loss {loss.item():.3f}, hidden cells right {running.item():.3f}")
    if step == args.steps:
        break
