"""Trains until the validation no longer improves, as a while loop with patience."""

import argparse
import itertools
from copy import deepcopy

import torch
from torch import nn


def make_data(amount):
    x = torch.randn(amount, 96)
    return x, torch.stack([x[:, :8].sum(1).sin(), x[:, 8:16].prod(1)], 1)


def shuffled(x, y, size):
    while True:
        for part in torch.randperm(len(x)).split(size):
            yield x[part], y[part]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.inner(x)


@torch.inference_mode()
def validate(model, x, y):
    model.eval()
    error = nn.functional.mse_loss(model(x), y).item()
    model.train()
    return error


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=160)
    most = cli.parse_args().steps
    torch.manual_seed(41)
    train, held = make_data(512 * 16), make_data(256)
    model = nn.Sequential(nn.Linear(96, 448), Residual(448), Residual(448), nn.Linear(448, 2))
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-4, foreach=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    best, kept, left, steps = float("inf"), None, 1000, itertools.count(1)
    feed = shuffled(*train, 512)
    while left > 0 and (step := next(steps)) <= most:  # the training loop
        x, y = next(feed)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            error = validate(model, *held)
            plateau.step(error)
            left -= 1
            if error < best:
                best, kept, left = error, deepcopy(model.state_dict()), 1000
            print(f"{step} train {loss.item():.3f} validation {error:.3f}")
    model.load_state_dict(kept or model.state_dict())


if __name__ == "__main__":
    main()
