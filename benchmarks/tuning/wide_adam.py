"""A small network whose gradients, freed in each step, are large enough to go back to the system."""

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    args = arguments()
    data = TensorDataset(torch.randn(4096, 256), torch.randint(0, 2, (4096,)))
    model = nn.Sequential(nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in epochs(DataLoader(data, batch_size=32, shuffle=True), args.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
