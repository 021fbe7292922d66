"""A CNN that two workers feed in time."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 150 * 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 32, 32, generator=generator), index % 10


def main():
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    cnn(torch.zeros(1, 3, 32, 32))
    optimizer = torch.optim.SGD(cnn.parameters(), lr=0.01)
    loader = DataLoader(Pictures(), 16, num_workers=2)
    for pictures, labels in loader:  # the training loop
        optimizer.zero_grad()
        nn.functional.cross_entropy(cnn(pictures), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
