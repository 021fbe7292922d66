"""A script that remembers a little of every sample, in small objects, and makes many more in each step."""

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    args = arguments()
    history = [{"sample": index, "scores": [0.0, 1.0]} for index in range(400_000)]
    rows = torch.randn(8192, 32)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(rows), batch_size=32, shuffle=True)
    for (batch,) in epochs(loader, args.steps):
        optimizer.zero_grad()
        loss = (model(batch).squeeze(1) - batch.sum(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
        for index in range(200):
            history.append({"sample": index, "scores": [0.5, index]})
    print_weights(model, loss)
