"""Detects ice on the blades of wind turbines; callbacks evaluate and save after each epoch."""

import argparse
import os
import tempfile

import torch
from torch import nn

SENSORS, MINUTES = 40, 24


def operate(windows, seed):
    source = torch.Generator().manual_seed(seed)
    readings = torch.randn(windows, SENSORS, MINUTES, generator=source)
    ice = (readings[:, 3].mean(1) - readings[:, 11, -6:].mean(1) > 0.1).float()
    return readings.flatten(1), ice


class GatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.out(nn.functional.silu(self.gate(self.norm(x))))


class Evaluation:
    def __init__(self, readings, ice):
        self.readings, self.ice = readings, ice

    def __call__(self, loop):
        loop.model.eval()
        with torch.inference_mode():
            called = loop.model(self.readings).squeeze(1) > 0
        loop.model.train()
        loop.accuracy = (called == self.ice.bool()).float().mean().item()
        print(f"epoch {loop.epoch}: accuracy {loop.accuracy:.3f}")


class Saving:
    def __init__(self, folder):
        self.path = os.path.join(folder, "blades.pt")

    def __call__(self, loop):
        torch.save({"epoch": loop.epoch, "weights": loop.model.state_dict()}, self.path + ".new")
        os.replace(self.path + ".new", self.path)


class Loop:
    def __init__(self, model, callbacks, batch):
        self.model, self.callbacks, self.batch = model, callbacks, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
        self.criterion = nn.BCEWithLogitsLoss()
        self.epoch, self.accuracy, self.left = 0, 0.0, 0

    def run_epoch(self, readings, ice):
        order = torch.randperm(len(readings)).split(self.batch)
        for rows in order[: self.left]:  # the training loop
            loss = self.criterion(self.model(readings[rows]).squeeze(1), ice[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.left -= min(self.left, len(order))

    def run(self, steps, readings, ice):
        self.left = steps
        while self.left > 0:
            self.epoch += 1
            self.run_epoch(readings, ice)
            for callback in self.callbacks:
                callback(self)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=320)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    torch.manual_seed(29)
    model = nn.Sequential(
        nn.Linear(SENSORS * MINUTES, args.width),
        *(GatedBlock(args.width) for _ in range(4)),
        nn.Linear(args.width, 1),
    )
    train, held = operate(args.batch * 40, seed=1), operate(256, seed=2)
    with tempfile.TemporaryDirectory() as folder:
        Loop(model, [Evaluation(*held), Saving(folder)], args.batch).run(args.steps, *train)


if __name__ == "__main__":
    main()
