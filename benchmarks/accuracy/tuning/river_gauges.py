"""Forecasts two weeks of discharge at river gauges from ninety days of weather."""

import argparse
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler


@dataclass
class Config:
    steps: int
    upstream: int
    substeps: int
    planned: int
    gauges: int = 48
    days: int = 3000
    drivers: int = 6
    window: int = 90
    horizon: int = 14
    batch: int = 64
    width: int = 48
    blocks: int = 3
    lr: float = 1e-3


class Archive:
    """Weather and discharge of all gauges, day by day."""

    def __init__(self, config):
        self.config = config
        rng = np.random.default_rng(12)
        self.rain = rng.gamma(0.4, 5.0, (config.gauges, config.days)).astype(np.float32)
        rain = torch.from_numpy(self.rain)
        self.drivers = torch.randn(config.gauges, config.days, config.drivers)
        self.drivers[..., 0] = torch.log1p(rain)
        recession = 0.15 * torch.exp(-0.15 * torch.arange(29, -1, -1.0))
        self.flow = F.conv1d(F.pad(rain, (29, 0))[:, None], recession[None, None])[:, 0]
        self.wet = F.avg_pool1d(F.pad(rain, (30, 0))[:, None, :-1], 30, stride=1)[:, 0]
        self.past = torch.arange(-config.window, 0)
        self.ahead = torch.arange(config.horizon)

    def upstream_wetness(self, gauge, day):
        rows = []
        for at, today in zip(gauge.tolist(), day.tolist(), strict=False):
            means = []
            for up in range(1, self.config.upstream + 1):
                rain = self.rain[(at - up) % self.config.gauges, today - 30 : today]
                means.append(rain.mean())
            rows.append(sum(means) / len(means))
        return torch.from_numpy(np.array(rows, dtype=np.float32)[:, None])

    def batch(self):
        config = self.config
        gauge = torch.randint(config.gauges, (config.batch,))
        day = torch.randint(config.window, config.days - config.horizon, (config.batch,))
        weather = self.drivers[gauge[:, None], day[:, None] + self.past]
        flow = self.flow[gauge[:, None], day[:, None] + self.ahead]
        wet = self.upstream_wetness(gauge, day) if config.upstream else self.wet[gauge, day].unsqueeze(1)
        return gauge, weather, wet, flow


class Mixer(nn.Module):
    def __init__(self, window, width):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.days = nn.Sequential(nn.Linear(window, window), nn.GELU())
        self.features = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.days(self.before(x).transpose(1, 2)).transpose(1, 2)
        return x + self.features(self.between(x))


class Reservoir(nn.Module):
    """Turns the runoff of a catchment into the discharge at its outlet."""

    def __init__(self, config):
        super().__init__()
        self.horizon, self.substeps = config.horizon, config.substeps
        self.recession = nn.Embedding(config.gauges, 1)
        days = torch.arange(config.horizon, dtype=torch.float32)
        self.register_buffer("lag", days[:, None] - days[None, :])

    def forward(self, runoff, gauge):
        k = torch.sigmoid(self.recession(gauge))
        if self.substeps:
            return self.integrate(runoff, k.squeeze(1))
        k = k.unsqueeze(2)
        response = k * torch.exp(-k * self.lag.clamp(min=0)) * (self.lag >= 0)
        return torch.bmm(response, runoff.unsqueeze(2)).squeeze(2)

    def integrate(self, runoff, k):
        dt = self.horizon / self.substeps
        storage = torch.zeros_like(k)
        outflow = []
        for n in range(self.substeps):
            inflow = runoff[:, n * self.horizon // self.substeps]
            storage = (storage + dt * inflow) / (1 + dt * k)
            outflow.append(k * storage)
        ends = [((day + 1) * self.substeps - 1) // self.horizon for day in range(self.horizon)]
        return torch.stack(outflow, 1)[:, ends]


class Forecaster(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inlet = nn.Linear(config.drivers, config.width)
        self.place = nn.Embedding(config.gauges, config.width)
        self.blocks = nn.ModuleList(Mixer(config.window, config.width) for _ in range(config.blocks))
        self.outlet = nn.Linear(config.width + 1, config.horizon)
        self.reservoir = Reservoir(config)

    def forward(self, gauge, weather, wet):
        x = self.inlet(weather) + self.place(gauge).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        runoff = F.softplus(self.outlet(torch.cat([x.mean(1), wet], 1)))
        return self.reservoir(runoff, gauge)


class PlannedRestarts(LRScheduler):
    """Cosine with warm restarts after a warm-up, as laid out for the whole run."""

    def __init__(self, optimizer, planned, warmup=20, period=100):
        self.planned, self.warmup, self.period = planned, warmup, period
        super().__init__(optimizer)

    def factor(self, n):
        warm = min(1.0, (n + 1) / self.warmup)
        return warm * (0.55 + 0.45 * math.cos(math.pi * (n % self.period) / self.period))

    @property
    def curve(self):
        return [self.factor(n) for n in range(self.planned)]

    def get_lr(self):
        return [base * self.curve[min(self.last_epoch, self.planned - 1)] for base in self.base_lrs]


def parameter_groups(model, lr):
    ends = [*model.inlet.parameters(), *model.place.parameters(), *model.outlet.parameters()]
    groups = [{"params": ends, "lr": lr}, {"params": list(model.reservoir.parameters()), "lr": 10 * lr}]
    for depth, block in enumerate(model.blocks):
        groups.append({"params": list(block.parameters()), "lr": lr * 0.9**depth})
    return groups


def train(config):
    archive, model = Archive(config), Forecaster(config)
    optimizer = torch.optim.AdamW(parameter_groups(model, config.lr), weight_decay=1e-4, fused=True)
    if config.planned:
        scheduler = PlannedRestarts(optimizer, config.planned)
    else:
        scheduler = CosineAnnealingWarmRestarts(optimizer, 100)
    for step in range(config.steps):  # the training loop
        gauge, weather, wet, flow = archive.batch()
        forecast = model(gauge, weather, wet)
        loss = F.smooth_l1_loss(torch.log1p(forecast), torch.log1p(flow))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--upstream", type=int, default=0, help="gauges whose rain says how wet it is")
    parser.add_argument("--substeps", type=int, default=0, help="of the reservoir, over the horizon")
    parser.add_argument("--planned", type=int, default=0, help="steps that the rate is laid out for")
    torch.manual_seed(7)
    train(Config(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
