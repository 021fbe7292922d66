"""Sorts cider apples on the belt. One process draws the pictures ahead of time; it stays for all passes."""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SIDE, SORTS = 24, 6


class Belt(IterableDataset):
    """One pass of the belt: batches of apples, drawn in one go each."""

    def __init__(self, batches, size):
        self.batches, self.size = batches, size
        palette = torch.Generator().manual_seed(0)
        self.colors = torch.rand(SORTS, 3, generator=palette)
        axis = torch.linspace(-1, 1, SIDE)
        self.radius = (axis.view(-1, 1).square() + axis.view(1, -1).square()).sqrt()

    def __iter__(self):
        for _ in range(self.batches):
            sort = torch.randint(SORTS, (self.size,))
            inside = self.radius < torch.empty(self.size, 1, 1).uniform_(0.5, 0.9)
            picture = inside.unsqueeze(1) * self.colors[sort].view(-1, 3, 1, 1)
            yield picture + 0.2 * torch.randn(self.size, 3, SIDE, SIDE), sort


class Callback:
    def on_step(self, trainer, loss):
        pass

    def on_pass(self, trainer):
        pass


class Report(Callback):
    def on_step(self, trainer, loss):
        if trainer.step % 40 == 0:
            print(f"{trainer.step}: {loss.item():.3f}")


class Keep(Callback):
    """The latest weights, and a line about the pass."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_pass(self, trainer):
        torch.save(trainer.net.state_dict(), self.folder / "latest.pt")
        with open(self.folder / "passes.jsonl", "a") as lines:
            lines.write(json.dumps({"step": trainer.step}) + "\n")


class Trainer:
    def __init__(self, net, loader, callbacks):
        self.net, self.loader, self.callbacks, self.step = net, loader, callbacks, 0
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)

    def fit(self, steps):
        while self.step < steps:  # the training loop
            for picture, sort in self.loader:
                loss = nn.functional.cross_entropy(self.net(picture), sort)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                for callback in self.callbacks:
                    callback.on_step(self, loss)
                if self.step == steps:
                    break
            for callback in self.callbacks:
                callback.on_pass(self)


def network(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(18 * width, SORTS),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--apples", type=int, default=48)
    options = parser.parse_args()
    torch.manual_seed(3)
    loader = DataLoader(
        Belt(100, options.apples),
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    with tempfile.TemporaryDirectory() as folder:
        Trainer(network(), loader, [Report(), Keep(folder)]).fit(options.steps)
