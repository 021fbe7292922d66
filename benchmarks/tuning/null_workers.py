"""A loader whose two persistent workers are always ahead."""

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    args = arguments()
    rows = torch.randn(8192, 256)
    model = nn.Sequential(
        nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
    loader = DataLoader(
        TensorDataset(rows), batch_size=64, shuffle=True, num_workers=2, persistent_workers=True
    )
    for (batch,) in epochs(loader, args.steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
