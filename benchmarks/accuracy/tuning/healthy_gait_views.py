"""Embeds steps of walkers, as an accelerometer sees them, without labels: VICReg on two views of a batch.

The views are made of the whole batch at once: another start, another gain, another turn of the sensor.
"""

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

AXES, LONG, SHORT = 3, 160, 128


class Weights(NamedTuple):
    alike: float = 25.0
    spread: float = 25.0
    apart: float = 1.0


def walks(count: int) -> torch.Tensor:
    """A few walkers, each with a rhythm and a pattern of harmonics of their own."""
    walker = torch.randint(24, (count,))
    pace = (0.03 + 0.05 * torch.rand(24))[walker]
    pattern = torch.randn(24, AXES, 4)[walker]
    ticks = torch.arange(LONG)
    waves = torch.sin(6.283 * pace[:, None, None] * torch.arange(1, 5)[:, None] * ticks)
    return pattern @ waves + 0.3 * torch.randn(count, AXES, LONG)


def turns(count: int) -> torch.Tensor:
    """Random rotations out of random quaternions."""
    w, x, y, z = F.normalize(torch.randn(count, 4) + torch.tensor([2.0, 0, 0, 0]), dim=1).unbind(1)
    rows = [
        torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)], 1),
        torch.stack([2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)], 1),
        torch.stack([2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)], 1),
    ]
    return torch.stack(rows, 1)


def view(batch: torch.Tensor) -> torch.Tensor:
    """Another look at each row: cut, turned and scaled."""
    count = len(batch)
    first = torch.randint(LONG - SHORT + 1, (count,))
    cut = batch.unfold(2, SHORT, 1)[torch.arange(count), :, first]
    gain = 0.8 + 0.4 * torch.rand(count, 1, 1)
    return (turns(count) * gain) @ cut


class Encoder(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(AXES, width, 7, stride=2, padding=3),
            nn.GELU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(2 * width, 2 * width, 3, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
        )
        self.expand = nn.Sequential(
            nn.Linear(8 * width, size), nn.BatchNorm1d(size), nn.ReLU(inplace=True), nn.Linear(size, size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expand(self.body(x))


def off_diagonal(z: torch.Tensor) -> torch.Tensor:
    """How much the columns of an embedding say the same, and how little each varies."""
    z = z - z.mean(0)
    covariance = z.T @ z / (len(z) - 1)
    variance = covariance.diagonal()
    apart = (covariance.square().sum() - variance.square().sum()) / z.shape[1]
    return torch.stack([F.relu(1 - (variance + 1e-4).sqrt()).mean(), apart])


def vicreg(both: torch.Tensor, weights: Weights) -> torch.Tensor:
    one, other = both.chunk(2)
    spread, apart = off_diagonal(one) + off_diagonal(other)
    return weights.alike * F.mse_loss(one, other) + weights.spread * spread + weights.apart * apart


def epochs(data: torch.Tensor, batch: int):
    while True:
        for rows in torch.randperm(len(data)).split(batch):
            if len(rows) == batch:
                yield data[rows]


def main(steps: int) -> None:
    torch.manual_seed(41)
    data = walks(4096)
    encoder = Encoder(width=24, size=256)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    total = torch.zeros(())
    for _, batch in zip(range(steps), epochs(data, 128), strict=False):  # the training loop
        # One pass over both views, hence one statistic of the norms for both.
        loss = vicreg(encoder(torch.cat([view(batch), view(batch)])), Weights())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach()
    print(f"mean loss {total.item() / steps:.3f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=200)
    main(cli.parse_args().steps)
