"""Will the mid price go up, stay or go down? From the last 64 states of a book, at three horizons."""

import argparse
import itertools

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

STATES, FIELDS, SYMBOLS, HORIZONS = 64, 10, 50, 3


def gated(width):
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 2 * width),
        nn.GLU(),
        nn.Linear(width, width),
    )


class MoveNet(nn.Module):
    def __init__(self, width=320, depth=2):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, 16)
        self.entry = nn.Linear(STATES * FIELDS + 16, width)
        self.layers = nn.ModuleList(gated(width) for _ in range(depth))
        self.moves = nn.Linear(width, 3 * HORIZONS)

    def forward(self, book, symbol):
        x = self.entry(torch.cat([book, self.symbols(symbol)], dim=1))
        for layer in self.layers:
            x = x + layer(x)
        return self.moves(x).view(-1, 3, HORIZONS)


def simulate(rows):
    book = torch.randn(rows, STATES * FIELDS)
    symbol = torch.randint(SYMBOLS, (rows,))
    drift = book[:, -HORIZONS:] + 0.3 * book[:, :HORIZONS] + 0.02 * (symbol[:, None] - 25)
    moves = (drift > -0.5).long() + (drift > 0.5).long()
    return TensorDataset(book, symbol, moves)


def forever(loader):
    for epoch in itertools.count():
        for batch in loader:
            yield epoch, batch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(2008)
    days = simulate(384 * 42)
    whole_batches = BatchSampler(RandomSampler(days), batch_size=384, drop_last=True)
    loader = DataLoader(
        days,
        sampler=whole_batches,
        batch_size=None,
        num_workers=1,
        prefetch_factor=4,
        persistent_workers=True,
    )
    model = MoveNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, fused=True)
    batches = itertools.islice(forever(loader), args.steps)
    for step, (epoch, (book, symbol, moves)) in enumerate(batches):  # the training loop
        loss = nn.functional.cross_entropy(model(book, symbol), moves)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0:
            print(f"epoch {epoch}, step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
