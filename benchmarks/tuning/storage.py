"""A dataset whose every sample waits for storage that is far away."""

import time

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, index):
        time.sleep(0.0005)
        row = torch.arange(64, dtype=torch.float32).add_(index).sin_()
        return row, row[:8].sum()


if __name__ == "__main__":
    args = arguments()
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows, targets in epochs(DataLoader(Remote(), batch_size=16, shuffle=True), args.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rows).squeeze(1), targets)
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
