"""Which entries of a guild's ledger were paid late? Crossed features and a perceptron, on a table."""

import argparse

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--rows", type=int, default=512)
args = parser.parse_args()

torch.manual_seed(41)
rng = np.random.default_rng(41)

# synthetic ledger: twelve columns of names and twelve of numbers
COUNT, COLUMNS, NAMES, NUMBERS, DIM = 60_000, 12, 400, 12, 16
names = rng.integers(0, NAMES, (COUNT, COLUMNS))
numbers = rng.standard_normal((COUNT, NUMBERS), dtype=np.float32)
weight = rng.normal(0, 1, (COLUMNS, NAMES))
logit = weight[np.arange(COLUMNS), names].sum(1) / 3 + numbers[:, 0] * numbers[:, 1]
late = torch.from_numpy((logit + rng.logistic(size=COUNT) > 0).astype(np.float32))
# one table holds the names of all columns, one column after the other
names = torch.from_numpy(names + NAMES * np.arange(COLUMNS))
numbers = torch.from_numpy(numbers)


class Crosses(nn.Module):
    def __init__(self, dim, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, first):
        x = first
        for layer in self.layers:
            x = torch.addcmul(x, first, layer(x))
        return x


class Ledger(nn.Module):
    def __init__(self):
        super().__init__()
        dim = COLUMNS * DIM + NUMBERS
        self.table = nn.Embedding(COLUMNS * NAMES, DIM)
        nn.init.normal_(self.table.weight, std=0.05)
        self.crosses = Crosses(dim)
        self.deep = nn.Sequential(
            nn.Linear(dim, 320), nn.ReLU(), nn.Linear(320, 160), nn.ReLU(), nn.Linear(160, 1)
        )

    def forward(self, names, numbers):
        x = torch.cat([self.table(names).flatten(1), numbers], 1)
        return self.deep(self.crosses(x)).squeeze(1)


model = Ledger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps + 1)
criterion = nn.BCEWithLogitsLoss()
seen = 0
order = torch.randperm(COUNT)

for step in range(args.steps):  # the training loop
    if seen + args.rows > COUNT:
        order, seen = torch.randperm(COUNT), 0
    rows = order[seen : seen + args.rows]
    seen += args.rows
    loss = criterion(model(names[rows], numbers[rows]), late[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if (step + 1) % 100 == 0:
        print(f"{step + 1} of {args.steps}: {loss.item():.4f}")
