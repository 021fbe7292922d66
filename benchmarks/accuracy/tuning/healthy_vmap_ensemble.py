"""Trains an ensemble at once, its members stacked and mapped over by torch.func."""

import argparse
from copy import deepcopy

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

MEMBERS, INPUTS, ROWS = 6, 32, 128


def member() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)
    )


def main() -> None:
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=200)
    steps = cli.parse_args().steps
    torch.manual_seed(29)
    members = [member() for _ in range(MEMBERS)]
    weights, buffers = stack_module_state(members)
    skeleton = deepcopy(members[0]).to("meta")
    optimizer = torch.optim.Adam(weights.values(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)

    def likelihood(weights, buffers, x, y):
        mean, spread = functional_call(skeleton, (weights, buffers), (x,)).unbind(-1)
        return (spread + (y - mean).square() * (-2 * spread).exp() / 2).mean()

    ensemble = vmap(likelihood)
    x = torch.randn(8192, INPUTS)
    y = (x[:, 0] * 3).sin() + x[:, 1] * torch.randn(8192) / 4
    for step in range(steps):  # the training loop
        rows = torch.randint(len(x), (MEMBERS, ROWS))  # a bootstrap of its own for each member
        losses = ensemble(weights, buffers, x[rows], y[rows])
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"{step + 1:4d} " + " ".join(f"{loss:.3f}" for loss in losses.tolist()))


if __name__ == "__main__":
    main()
