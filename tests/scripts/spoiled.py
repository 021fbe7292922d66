"""Samples made in worker processes are no numbers after a while. Prints what became of the training."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MAIN = os.getpid()
made = 0


class Spoiled(Dataset):
    """Slow, and random, so that its samples differ with workers."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.001)
        global made
        made += os.getpid() != MAIN
        return torch.rand(8) if made < 12 else torch.full((8,), float("nan"))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(40):
        for batch in DataLoader(Spoiled(), batch_size=4, shuffle=True):
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(sum(loss != loss for loss in losses), all(p.isfinite().all().item() for p in model.parameters()))
