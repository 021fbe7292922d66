"""Predicts yarn breaks in a spinning mill: an averaged GRU, with exact statistics and a log file."""

import argparse
import logging
import tempfile
from pathlib import Path

import torch
from torch import nn

SPINDLES, TIMES = 8, 40


class Breaks(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.gru = nn.GRU(SPINDLES, hidden, batch_first=True)
        self.risk = nn.Linear(hidden, SPINDLES)

    def forward(self, tension):
        return self.risk(self.gru(tension)[0][:, -1])


class Statistics:
    """Sums of many small numbers want more digits than the net does."""

    def __init__(self):
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, loss):
        self.sums += torch.stack((torch.ones(()), loss, loss * loss))

    def __str__(self):
        n, total, squares = self.sums.tolist()
        return f"{total / n:.5f} +- {max(squares / n - (total / n) ** 2, 0) ** 0.5:.5f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(70)
    tension = torch.randn(1024, TIMES, SPINDLES).cumsum(1) * 0.1
    broken = (tension[:, -8:].amax(1) > 0.9).float()
    model = Breaks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    weights = [p.detach() for p in model.parameters()]
    average = [w.clone() for w in weights]
    statistics = Statistics()

    with tempfile.TemporaryDirectory() as folder:
        handler = logging.FileHandler(Path(folder, "mill.log"))
        logger = logging.getLogger("mill")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        for step in range(args.steps):  # the training loop
            some = torch.randint(1024, (64,))
            loss = nn.functional.binary_cross_entropy_with_logits(model(tension[some]), broken[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch._foreach_lerp_(average, weights, 0.02)
            statistics.add(loss.detach())
            if step % 25 == 24:
                logger.info("%d shifts: %s", step + 1, statistics)
            if step % 100 == 99:
                print(f"{step + 1} shifts: {statistics}", flush=True)
        handler.close()


if __name__ == "__main__":
    main()
