"""Large matrices and data in memory: the step is arithmetic."""

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader

if __name__ == "__main__":
    args = arguments()
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
    loader = DataLoader(list(torch.randn(32, 64, 512)), batch_size=None)
    for batch in epochs(loader, args.steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
