"""A loop that waits for its data: one sleep per sample, on the training thread. Prints what it computed."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((8,), float(index) / 256)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Slow(), batch_size=4, shuffle=True)
    order = 0
    for _ in range(int(sys.argv[1])):
        for batch in loader:
            order = (
                order * 31 + sum(int(x * 256) * (i + 1) for i, x in enumerate(batch[:, 0].tolist()))
            ) % 2**61
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    print(order, torch.rand(1).item(), [p.double().sum().item() for p in model.parameters()])
