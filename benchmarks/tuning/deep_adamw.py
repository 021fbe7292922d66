"""A deep and narrow network: AdamW updates its many small tensors one by one."""

import time

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, wait_ms):
        self.rows = torch.randn(4096, 48, generator=torch.Generator().manual_seed(1))
        self.wait_s = wait_ms / 1000

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.rows[index]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x):
        return x + 0.1 * torch.tanh(self.layer(x))


if __name__ == "__main__":
    args = arguments(wait_ms=0.0)
    model = nn.Sequential(*[Residual() for _ in range(120)], nn.Linear(48, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for rows in epochs(DataLoader(Rows(args.wait_ms), batch_size=16, shuffle=True), args.steps):
        optimizer.zero_grad()
        loss = (model(rows).squeeze(1) - rows.sum(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
