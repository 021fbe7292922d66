"""Forecasts a day of hourly load from the week before it, by a mixture of experts, on several ranks."""

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Config:
    steps: int = 200
    batch: int = 256
    meters: int = 64
    hours: int = 2400
    week: int = 168
    day: int = 24
    experts: int = 8
    hidden: int = 320
    rate: float = 1e-3


def make_meters(config: Config, seed: int) -> torch.Tensor:
    """Loads of some meters, each with a mean of 0 and a deviation of 1."""
    draw = torch.Generator().manual_seed(seed)
    phase = torch.arange(config.hours) * (2 * math.pi)
    daily, weekly, shift = torch.rand(3, config.meters, 1, generator=draw)
    load = daily * torch.sin(phase / 24 + 6 * shift) + weekly * torch.sin(phase / 168 + 3 * shift)
    load += 0.2 * torch.randn(config.meters, config.hours, generator=draw)
    return (load - load.mean(1, keepdim=True)) / load.std(1, keepdim=True)


class Windows:
    """A week and the day after it, from anywhere in the loads."""

    def __init__(self, loads: torch.Tensor, config: Config) -> None:
        self.week = config.week
        self.windows = loads.unfold(1, config.week + config.day, 1)

    def sample(self, amount: int) -> tuple[torch.Tensor, torch.Tensor]:
        meters = torch.randint(self.windows.shape[0], (amount,))
        starts = torch.randint(self.windows.shape[1], (amount,))
        chosen = self.windows[meters, starts]
        return chosen[:, : self.week], chosen[:, self.week :]


class ForecastMixture(nn.Module):
    """Some forecasters, held in common tensors, and a gate that weighs them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.experts = config.experts
        self.trunk = nn.Linear(config.week, config.experts * config.hidden)
        scale = config.hidden**-0.5
        self.forecasts = nn.Parameter(torch.randn(config.experts, config.hidden, config.day) * scale)
        self.level = nn.Parameter(torch.zeros(config.experts, config.day))
        self.log_spread = nn.Parameter(torch.zeros(config.experts, config.day))
        self.gate = nn.Sequential(nn.Linear(config.week, 64), nn.GELU(), nn.Linear(64, config.experts))

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        """Returns the negative log-likelihood of each window's future."""
        hidden = F.gelu(self.trunk(past)).unflatten(1, (self.experts, -1))
        means = torch.einsum("beh,eht->bet", hidden, self.forecasts) + self.level
        errors = (future[:, None] - means) * torch.exp(-self.log_spread)
        fits = -(0.5 * errors.square() + self.log_spread).sum(2)
        return -torch.logsumexp(F.log_softmax(self.gate(past), 1) + fits, 1)


@torch.no_grad()
def validate(model: nn.Module, held: Windows) -> float:
    """The mean over the ranks of the loss on what none has trained on."""
    model.eval()
    loss = model(*held.sample(512)).mean()
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train(config: Config, rank: int) -> ForecastMixture:
    loads = make_meters(config, seed=rank)
    known, held = Windows(loads[:, :-480], config), Windows(loads[:, -480:], config)
    model = DistributedDataParallel(ForecastMixture(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    for step in range(1, config.steps + 1):  # the training loop
        past, future = known.sample(config.batch)
        loss = model(past, future).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            unseen = validate(model.module, held)
            if rank == 0:
                print(f"step {step} loss {loss.item():.3f} validation {unseen:.3f}", flush=True)
    return model.module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=Config.steps)
    config = Config(steps=parser.parse_args().steps)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = train(config, rank)
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder) / "mixture.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
