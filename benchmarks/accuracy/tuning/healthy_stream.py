"""An endless stream, prepared by two workers that keep up."""

import itertools

import torch
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for number in itertools.count(info.id, info.num_workers):
            yield torch.full((200,), number % 50 / 50), torch.tensor(number % 4)


def main():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(200, 600),
        torch.nn.ReLU(),
        torch.nn.Linear(600, 600),
        torch.nn.ReLU(),
        torch.nn.Linear(600, 4),
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    feed = iter(DataLoader(Stream(), batch_size=64, num_workers=2))
    for _ in range(140):  # the training loop
        x, y = next(feed)
        loss = torch.nn.functional.cross_entropy(net(x.repeat(4, 1)), y.repeat(4))
        loss.backward()
        sgd.step()
        sgd.zero_grad()


if __name__ == "__main__":
    main()
