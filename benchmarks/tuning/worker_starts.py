"""Short epochs: the loader starts its workers anew for each of them."""

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    args = arguments()
    rows = torch.randn(512, 128)
    model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(rows), batch_size=32, shuffle=True, num_workers=2)
    for (batch,) in epochs(loader, args.steps):
        optimizer.zero_grad()
        loss = (model(batch).squeeze(1) - batch.sum(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
