"""Steps of about a millisecond, whole batches in memory."""

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader

if __name__ == "__main__":
    args = arguments()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(list(torch.randn(200, 32, 32)), batch_size=None, shuffle=True)
    for batch in epochs(loader, args.steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
