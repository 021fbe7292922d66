"""Quantile forecasts of the load of substations: a patch transformer over one week, for the next day."""

from __future__ import annotations

import argparse
import math
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

HOURS_PER_DAY = 24
CONTEXT, HORIZON, PATCH = 168, 24, 12
QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


@dataclass(frozen=True)
class Setup:
    steps: int
    regional_holidays: int = 0
    planned: int = 0
    origins: int = 0
    grace: float = 0.0
    grad_blocks: int = 0
    watched: int = 0
    batch: int = 64
    width: int = 96
    depth: int = 3
    lr: float = 1e-3


@dataclass
class Meters:
    """Hourly readings of all substations, and for each day how far the nearest public holiday is."""

    load: Tensor
    holidays: list[int]
    nearest: Tensor = field(init=False)

    def __post_init__(self) -> None:
        days = torch.arange(self.load.shape[1] // HOURS_PER_DAY + 1)
        self.nearest = (days[:, None] - torch.tensor(self.holidays)).abs().amin(1).float()

    @classmethod
    def simulated(cls, stations: int, days: int, holidays: int) -> Meters:
        hours = torch.arange(days * HOURS_PER_DAY)
        phase, level = torch.rand(stations, 1), 1 + torch.rand(stations, 1)
        daily = torch.sin(2 * math.pi * (hours / HOURS_PER_DAY + phase))
        weekly = 0.4 * torch.cos(2 * math.pi * (hours / (7 * HOURS_PER_DAY) + phase))
        noise = 0.2 * torch.randn(stations, len(hours))
        return cls(level * (2 + daily + weekly + noise), torch.randint(days, (holidays,)).tolist())

    @property
    def windows(self) -> Tensor:
        return self.load.unfold(1, CONTEXT + HORIZON, 1)

    def distance(self, day: int) -> float:
        return float(min(abs(day - holiday) for holiday in self.holidays))


class Sampler:
    def __init__(self, meters: Meters, batch: int, each_region: bool) -> None:
        self.meters, self.batch, self.each_region = meters, batch, each_region
        self.stations, self.starts = meters.windows.shape[:2]

    def covariates(self, start: Tensor) -> Tensor:
        first = start // HOURS_PER_DAY
        if self.each_region:
            span = range((CONTEXT + HORIZON) // HOURS_PER_DAY)
            rows = [[self.meters.distance(day + ahead) for ahead in span] for day in first.tolist()]
            return torch.tensor(rows)
        ahead = torch.arange((CONTEXT + HORIZON) // HOURS_PER_DAY)
        return self.meters.nearest[first[:, None] + ahead]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            station = torch.randint(self.stations, (self.batch,))
            start = torch.randint(self.starts, (self.batch,))
            window = self.meters.windows[station, start]
            yield window[:, :CONTEXT], self.covariates(start).log1p(), window[:, CONTEXT:]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))
        return x + self.down(gelu(self.up(self.between(x))))


class PatchForecaster(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, width)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT // PATCH, width))
        self.calendar = nn.Linear((CONTEXT + HORIZON) // HOURS_PER_DAY, width)
        self.encoder = nn.Sequential(*(Layer(width) for _ in range(depth)))
        self.head = nn.Linear(CONTEXT // PATCH * width, HORIZON * len(QUANTILES))

    def forward(self, past: Tensor, days: Tensor) -> Tensor:
        level, scale = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-3
        tokens = self.patches(((past - level) / scale).view(len(past), -1, PATCH)) + self.place
        encoded = self.encoder(tokens + self.calendar(days)[:, None])
        spread = self.head(encoded.flatten(1)) * scale + level
        return spread.view(len(past), HORIZON, len(QUANTILES))


def pinball(forecast: Tensor, truth: Tensor, levels: Tensor) -> Tensor:
    error = truth[..., None] - forecast
    return torch.maximum(levels * error, (levels - 1) * error).mean()


@dataclass(frozen=True)
class WarmCosine:
    """The factor of the learning rate; with `planned`, its mean over the planned run is 1."""

    warm: int
    end: int
    planned: int = 0

    def shape(self, step: int) -> float:
        if step < self.warm:
            return (step + 1) / self.warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warm) / (self.end - self.warm))))

    def mean(self) -> float:
        return sum(map(self.shape, range(self.planned))) / self.planned

    def __call__(self, step: int) -> float:
        return self.shape(step) / self.mean() if self.planned else self.shape(step)


class Trainer:
    def __init__(self, setup: Setup, meters: Meters) -> None:
        self.setup, self.meters = setup, meters
        self.model = PatchForecaster(setup.width, setup.depth)
        self.levels = torch.tensor(QUANTILES)
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": 0.02},
            {"params": [p for p in self.model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=setup.lr, fused=True)
        factor = WarmCosine(20, setup.planned or setup.steps, setup.planned)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.stop = threading.Event()
        self.peaks: dict[str, Tensor] = {}
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())

    def note_peak(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen = output.detach().flatten()[: self.setup.watched].abs()
        self.peaks[type(module).__name__] = torch.quantile(seen, 0.999)

    def limit_gradients(self, limit: float = 1.0) -> None:
        if not self.setup.grad_blocks:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
            return
        for param in self.model.parameters():
            assert param.grad is not None
            for block in param.grad.view(-1).chunk(self.setup.grad_blocks):
                norm = torch.linalg.vector_norm(block)
                if norm > limit:
                    block.mul_(limit / norm)

    @torch.no_grad()
    def backtest(self, origins: int) -> float:
        """The mean loss over the latest origins of the forecast, station by station."""
        total, windows = 0.0, self.meters.windows
        for first in range(0, origins, 64):
            origin = torch.arange(first, min(first + 64, origins))
            start = windows.shape[1] - 1 - origin // len(windows) % windows.shape[1]
            window = windows[origin % len(windows), start]
            ahead = start[:, None] // HOURS_PER_DAY + torch.arange((CONTEXT + HORIZON) // HOURS_PER_DAY)
            forecast = self.model(window[:, :CONTEXT], self.meters.nearest[ahead].log1p())
            total += pinball(forecast, window[:, CONTEXT:], self.levels).item() * len(origin)
        return total / origins

    def fit(self) -> None:
        batches = Sampler(self.meters, self.setup.batch, self.setup.regional_holidays > 0)
        best = math.inf
        for step, (past, days, future) in zip(
            range(self.setup.steps), batches, strict=False
        ):  # the training loop
            if self.setup.watched:
                self.model.encoder.register_forward_hook(self.note_peak)
            loss = pinball(self.model(past, days), future, self.levels)
            self.optimizer.zero_grad()
            loss.backward()
            self.limit_gradients()
            self.optimizer.step()
            self.schedule.step()
            if self.setup.origins and step % 10 == 9:
                best = min(best, self.backtest(self.setup.origins))
            if self.stop.wait(self.setup.grace / 1000) if self.setup.grace else self.stop.is_set():
                break
        print(f"loss {loss.item():.4f}, backtest {min(best, self.backtest(256)):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=211)
    parser.add_argument("--regional-holidays", type=int, default=0, help="holidays of all regions together")
    parser.add_argument("--planned", type=int, default=0, help="steps of the whole plan, to level its rate")
    parser.add_argument("--origins", type=int, default=0, help="forecasts in a backtest, every tenth step")
    parser.add_argument(
        "--grace", type=float, default=0, help="milliseconds to listen for the order to stop"
    )
    parser.add_argument(
        "--grad-blocks", type=int, default=0, help="blocks of a tensor limited on their own"
    )
    parser.add_argument("--watched", type=int, default=0, help="activations of which the peak is noted")
    setup = Setup(**vars(parser.parse_args()))
    torch.manual_seed(29)
    Trainer(setup, Meters.simulated(80, 120, setup.regional_holidays or 12)).fit()


if __name__ == "__main__":
    main()
