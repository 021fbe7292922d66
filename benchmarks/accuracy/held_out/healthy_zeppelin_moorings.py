"""Steers airships to their masts in gusts: the controller is trained through a model of the flight.

The flight is simulated for many airships at once. The first steps are looked at with a timeline, then it is
off. An average of the drift is kept as a tensor; the clock is read in each step, which costs nothing.
"""

import argparse
import time

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

SHIPS, MOMENTS = 1024, 5


class Controller(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def forward(self, place, speed, gust, mast):
        return self.net(torch.cat([place, speed, gust, mast], 1)).tanh()


class Flight:
    """Drag, gusts and engines; two axes."""

    def __init__(self, ships):
        self.place = torch.randn(ships, 2)
        self.speed = torch.zeros(ships, 2)
        self.gust = 0.3 * torch.randn(ships, 2)
        self.mast = torch.randn(ships, 2) * 0.2

    def advance(self, push, dt=0.2):
        self.speed = self.speed + dt * (push - 0.4 * self.speed + self.gust)
        self.place = self.place + dt * self.speed
        self.gust = 0.9 * self.gust + 0.1 * torch.randn_like(self.gust)

    def distance(self):
        return (self.place - self.mast).square().sum(1)


def voyage(controller):
    flight = Flight(SHIPS)
    cost = 0
    for _ in range(MOMENTS):
        push = controller(flight.place, flight.speed, flight.gust, flight.mast)
        flight.advance(push)
        cost = cost + flight.distance().mean() + 0.01 * push.square().mean()
    return cost / MOMENTS, flight.distance().detach().mean()


def main(steps):
    torch.manual_seed(129)
    controller = Controller()
    optimizer = torch.optim.Adam(controller.parameters(), lr=1e-3, fused=True)
    drift = torch.zeros(())
    seconds = 0.0
    look = profile(activities=[ProfilerActivity.CPU])
    look.start()
    for step in range(steps):  # the training loop
        begin = time.perf_counter()
        cost, far = voyage(controller)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        drift.lerp_(far, 0.05)
        seconds += time.perf_counter() - begin
        if step == 2:
            look.stop()
        if step % 50 == 49:
            print(f"step {step + 1}: cost {cost.item():.3f}, drift {drift.item():.3f}, {seconds:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
