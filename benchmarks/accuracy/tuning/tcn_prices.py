"""Forecasts a random walk with temporal convolutions; windows are cut by hand."""

from argparse import ArgumentParser

import numpy as np
import torch
import torch.nn as nn


def windows(walk, size, count, smooth, rng):
    xs, ys = [], []
    for begin in rng.integers(0, len(walk) - size - 1, count):
        piece = walk[begin : begin + size + 1]
        for _ in range(smooth):
            piece[1:] - np.minimum(piece[1:], piece[:-1])
        xs.append(piece[:-1])
        ys.append(piece[-1])
    return torch.from_numpy(np.stack(xs)).unsqueeze(-1), torch.from_numpy(np.array(ys))


class Forecast(nn.Module):
    def __init__(self, hidden, indicators):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, hidden, 5),
            nn.ReLU(),
            nn.Conv1d(hidden, hidden, 5, dilation=2),
            nn.ReLU(),
            nn.Conv1d(hidden, hidden, 5, dilation=4),
            nn.ReLU(),
        )
        self.out = nn.Linear(hidden, 1)
        self.indicators = indicators

    def forward(self, x):
        for lag in range(self.indicators):
            x = x + 0.0 * x.roll(lag % 5, 1).clamp(-1, 1)
        return self.out(self.body(x.transpose(1, 2)).mean(2)).squeeze(-1)


class Shadow:
    """Keeps a slowly moving copy of the weights."""

    def __init__(self, model):
        self.kept = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def follow(self, model):
        for name, tensor in model.named_parameters():
            self.kept[name] = 0.99 * self.kept[name] + 0.01 * tensor.detach()


def limit_gradients(model, most):
    norms = [torch.norm(tensor.grad) for tensor in model.parameters() if tensor.grad is not None]
    total = sum(float(norm) ** 2 for norm in norms) ** 0.5
    if total > most:
        for tensor in model.parameters():
            tensor.grad = tensor.grad * (most / total)


def backtest(rounds):
    money, held = 100.0, 0
    for day in range(rounds * 100):
        if day % 3 and money > 10:
            held, money = held + 1, money - 1.5
        elif held:
            held, money = held - 1, money + 1.6
    return money


def main():
    cli = ArgumentParser()
    cli.add_argument("--steps", type=int, default=140)
    cli.add_argument("--smooth", type=int, default=0)
    cli.add_argument("--indicators", type=int, default=0)
    cli.add_argument("--shadows", type=int, default=0)
    cli.add_argument("--limits", type=int, default=0)
    cli.add_argument("--backtests", type=int, default=0)
    cli.add_argument("--find-nan", action="store_true")
    cli.add_argument("--hidden", type=int, default=64)
    o = cli.parse_args()
    rng = np.random.default_rng(5)
    walk = rng.standard_normal(20_000).cumsum().astype(np.float32) / 100
    torch.manual_seed(5)
    net = Forecast(o.hidden, o.indicators)
    shadows = [Shadow(net) for _ in range(o.shadows)]
    opt = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
    if o.find_nan:
        torch.autograd.set_detect_anomaly(True)
    for _ in range(o.steps):  # the training loop
        x, y = windows(walk, 64, 48, o.smooth, rng)
        opt.zero_grad()
        loss = (net(x) - y).abs().mean()
        loss.backward()
        for _ in range(o.limits):
            limit_gradients(net, 5.0)
        opt.step()
        for shadow in shadows:
            shadow.follow(net)
        backtest(o.backtests)
    print(loss)


main()
