"""Samples made in worker processes are no numbers after a while. Prints what became of the training."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from diagnose.launch.process_clock import own_age_s

MAIN = os.getpid()


class Spoiled(Dataset):
    """Slow, and random, so that its samples differ with workers."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.001)
        is_old = os.getpid() != MAIN and own_age_s() > 0.1
        return torch.full((8,), float("nan")) if is_old else torch.rand(8)


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
