"""The tone of a church bell: a network u(x, t) that obeys the equation of a stiff string, by its derivatives.

Derivatives of derivatives need the graph twice; that is what the method costs. A thread waits for the sexton, who
may ask us to stop, and the mean of the losses is kept in a Python number only when it is printed.
"""

import argparse
import math
import signal
import threading

import torch
from torch import nn


class Wave(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2, width))
        self.one = nn.Linear(2 * width, width)
        self.two = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, place):
        angle = place @ self.scale
        x = torch.tanh(self.one(torch.cat([angle.sin(), angle.cos()], 1)))
        return self.out(torch.tanh(self.two(x)))


def slope(value, place):
    return torch.autograd.grad(value.sum(), place, create_graph=True)[0]


def tension(wave, place):
    place.requires_grad_()
    first = slope(wave(place), place)
    along = slope(first[:, 0], place)[:, 0]
    after = slope(first[:, 1], place)[:, 1]
    return (after - along).square().mean()


def struck(wave, place):
    """At the beginning it has the shape that the clapper gives it."""
    start = torch.stack([place[:, 0], torch.zeros(len(place))], 1)
    return (wave(start).squeeze(1) - torch.sin(math.pi * place[:, 0])).square().mean()


def listen(asked, stop):
    asked.wait()
    stop.set()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--places", type=int, default=640)
    args = parser.parse_args()
    torch.manual_seed(12)
    asked, stop = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    threading.Thread(target=listen, args=(asked, stop), daemon=True).start()

    wave = Wave()
    optimizer = torch.optim.Adam(wave.parameters(), lr=1e-3, fused=True)
    sums = torch.zeros((), dtype=torch.float64)
    for step in range(1, args.steps + 1):  # the training loop
        if stop.is_set():
            break
        place = torch.rand(args.places, 2)
        loss = 10 * struck(wave, place) + tension(wave, place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums += loss.detach()
        if step % 50 == 0:
            print(f"{step} steps, mean loss {sums.item() / step:.4f}")


if __name__ == "__main__":
    main()
