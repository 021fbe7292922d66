"""Limited-angle tomography: a coordinate network is fitted to the shadows of one object with L-BFGS.

One step is one call of the optimizer, which calls back for the loss as often as its line search likes.
All rays take part each time: there is nothing to load, and no batch.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Geometry:
    angles: int = 24
    detectors: int = 24
    samples: int = 24

    def points(self) -> Tensor:
        """Where the rays are sampled, as angles x detectors x samples x 2."""
        turn = torch.linspace(0, 0.7 * math.pi, self.angles).view(-1, 1, 1)
        across = torch.linspace(-0.9, 0.9, self.detectors).view(1, -1, 1)
        along = torch.linspace(-1, 1, self.samples).view(1, 1, -1)
        x = across * turn.cos() - along * turn.sin()
        y = across * turn.sin() + along * turn.cos()
        return torch.stack([x, y], 3)

    def integrate(self, density: Tensor) -> Tensor:
        return density.view(self.angles, self.detectors, self.samples).sum(2) * (2 / self.samples)


def phantom(points: Tensor) -> Tensor:
    """Three discs, one of them hollow."""
    density = torch.zeros(points.shape[:-1])
    for x, y, radius, value in ((0.0, 0.1, 0.6, 1.0), (-0.2, 0.2, 0.25, -0.7), (0.3, -0.2, 0.1, 0.8)):
        inside = (points - torch.tensor([x, y])).square().sum(-1) < radius**2
        density += value * inside
    return density


class Waves(nn.Module):
    """Fixed random Fourier features; they are computed once, since the rays never move."""

    def __init__(self, count: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("directions", scale * torch.randn(2, count))

    @torch.no_grad()
    def forward(self, points: Tensor) -> Tensor:
        phase = points @ self.directions
        return torch.cat([phase.sin(), phase.cos()], -1)


class Density(nn.Sequential):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(
            nn.Linear(inputs, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
            nn.Softplus(),
        )


class Fit:
    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        points = geometry.points()
        clean = geometry.integrate(phantom(points))
        self.shadows = clean + 0.01 * torch.randn_like(clean)
        self.features = Waves(24, 3.0)(points.view(-1, 2))
        self.density = Density(self.features.shape[1], 48)
        self.optimizer = torch.optim.LBFGS(
            self.density.parameters(), lr=0.8, max_iter=2, history_size=12, line_search_fn="strong_wolfe"
        )
        self.evaluations = 0

    def loss(self) -> Tensor:
        predicted = self.geometry.integrate(self.density(self.features))
        return (predicted - self.shadows).square().mean()

    def evaluate(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.evaluations += 1
        return loss

    def step(self) -> Tensor:
        return self.optimizer.step(self.evaluate)


def main(steps: int) -> None:
    torch.manual_seed(3)
    fit = Fit(Geometry())
    first = last = fit.step()
    for _ in range(1, steps):  # the training loop
        last = fit.step()
    print(f"{fit.evaluations} evaluations, loss {first.item():.5f} -> {last.item():.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    main(parser.parse_args().steps)
