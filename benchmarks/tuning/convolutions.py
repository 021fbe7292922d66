"""A small residual network on images in memory."""

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


if __name__ == "__main__":
    args = arguments()
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3, padding=1),
        Block(48),
        Block(48),
        nn.MaxPool2d(2),
        Block(48),
        Block(48),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )
    kinds = torch.randint(10, (512,))
    images = torch.randn(512, 3, 32, 32) + torch.randn(10, 3, 32, 32)[kinds]
    data = TensorDataset(images, kinds)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch, labels in epochs(DataLoader(data, batch_size=8, shuffle=True), args.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
