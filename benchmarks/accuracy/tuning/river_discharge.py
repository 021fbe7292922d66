"""Forecast river levels from a stream of gauge readings.

The archive is one long stream of compressed records. A record holds the readings of 48 gauges over one window; the
loader decodes it and hands it on as a batch. The forecaster is a stack of gated dilated convolutions.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


@dataclass
class Settings:
    steps: int = 200
    gauges: int = 48
    window: int = 96
    horizon: int = 24
    channels: int = 24
    depth: int = 8
    lr: float = 2e-3
    more_readers: int = 0
    floods: int = 0
    radar: int = 0
    decays: int = 0


class Archive:
    """Records as they lie in the archive: differences of levels in tenths of a millimetre, as int16."""

    def __init__(self, settings: Settings, records: int = 24):
        rng = np.random.default_rng(5)
        length = settings.window + settings.horizon
        self.oversampling = 120  # the loggers write every 30 seconds, we use hours
        self.records = [
            rng.integers(-40, 41, size=(settings.gauges, length * self.oversampling), dtype=np.int16)
            for _ in range(records)
        ]
        self.offsets = rng.normal(2.0, 0.7, size=(records, settings.gauges, 1)).astype(np.float32)
        self.radar = rng.random((max(settings.radar, 1), 256, 256), dtype=np.float32)

    def decode(self, index: int) -> np.ndarray:
        """Sum the differences up, cut spikes off, and average over each hour."""
        raw = self.records[index % len(self.records)]
        levels = np.cumsum(raw, axis=1, dtype=np.float32)
        levels *= 1e-4
        steps = levels[:, 1:] - levels[:, :-1]
        np.clip(steps, -0.0035, 0.0035, out=steps)
        levels[:, 1:] = levels[:, :1] + np.cumsum(steps, axis=1)
        hours = levels.reshape(len(raw), -1, self.oversampling).mean(axis=2)
        return hours + self.offsets[index % len(self.records)]


class GaugeStream(IterableDataset):
    """The archive from its beginning to its end; of the decoded records each reader keeps every n-th."""

    def __init__(self, archive: Archive, settings: Settings):
        self.archive = archive
        self.settings = settings

    def floods(self, levels: np.ndarray) -> list[torch.Tensor]:
        """The stretches around the highest levels of the gauges, each as long as it happens to be."""
        flat = torch.from_numpy(levels)
        crests = levels.argmax(axis=1)
        found = []
        for number in range(self.settings.floods):
            gauge = number % len(levels)
            reach = 2 + number % 11
            crest = int(crests[gauge])
            found.append(flat[gauge, max(crest - reach, 0) : crest + reach].clone())
        return found

    def __iter__(self):
        info = get_worker_info()
        mine, readers = (info.id, info.num_workers) if info else (0, 1)
        number = 0
        while True:
            levels = self.archive.decode(number)
            if number % readers == mine:
                item = {"levels": torch.from_numpy(levels), "record": number}
                if self.settings.floods:
                    item["floods"] = self.floods(levels)
                if self.settings.radar:
                    item["radar"] = self.archive.radar  # rain over the catchment, for the maps below
                yield item
            number += 1


def as_it_is(record: dict) -> dict:
    return record


class GatedBlock(nn.Module):
    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.pad = 2 * dilation
        self.filter = nn.Conv1d(channels, 2 * channels, 3, dilation=dilation)
        self.out = nn.Conv1d(channels, channels, 1)
        self.scale = nn.Parameter(torch.full((channels, 1), 0.5))

    def forward(self, x):
        gated = F.glu(self.filter(F.pad(x, (self.pad, 0))), dim=1)
        return x + self.scale * self.out(gated)


class Forecaster(nn.Module):
    def __init__(self, settings: Settings):
        super().__init__()
        self.inlet = nn.Conv1d(1, settings.channels, 1)
        self.blocks = nn.Sequential(
            *[GatedBlock(settings.channels, 2 ** (i % 5)) for i in range(settings.depth)]
        )
        self.outlet = nn.Linear(settings.channels, settings.horizon)

    def forward(self, levels):
        base = levels[:, -1:]
        x = self.inlet((levels - base).unsqueeze(1))
        return base + self.outlet(self.blocks(x)[:, :, -1])


def averages_of(model: nn.Module, count: int) -> list[AveragedModel]:
    """Averages over different times: which is best is only known in the end."""
    averages = []
    for number in range(count):
        decay = 1 - 0.1 * 0.7**number
        averages.append(AveragedModel(model, avg_fn=lambda old, new, _, d=decay: d * old + (1 - d) * new))
    return averages


def train(settings: Settings) -> None:
    torch.manual_seed(21)
    archive = Archive(settings)
    loader = DataLoader(
        GaugeStream(archive, settings),
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=1 + settings.more_readers,
        prefetch_factor=2,
    )
    model = Forecaster(settings)
    averages = averages_of(model, settings.decays)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True)
    running = torch.zeros(())
    crest_error = torch.zeros(())

    batches = iter(loader)
    for step in range(settings.steps):  # the training loop
        batch = next(batches)
        levels = batch["levels"]
        past, future = levels[:, : settings.window], levels[:, settings.window :]
        forecast = model(past)
        loss = F.smooth_l1_loss(forecast, future, beta=0.02)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(model)

        running += loss.detach()
        if settings.floods:
            crest_error += torch.cat(batch["floods"]).amax() - forecast.detach().amax()
        if (step + 1) % 40 == 0:
            print(f"step {step + 1}: loss {running.item() / 40:.5f}")
            if settings.floods:
                print(f"  highest crest is off by {crest_error.item() / (step + 1):+.3f} m")
            if settings.radar:
                print(f"  rain over the catchment {batch['radar'][-1].mean():.3f}")
            running.zero_()

    for number, average in enumerate(averages):
        with torch.no_grad():
            print(f"average {number}: {F.l1_loss(average(past), future).item():.4f}")


def parse() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--more-readers", type=int, default=0, help="readers of the archive besides the first"
    )
    parser.add_argument("--floods", type=int, default=0, help="flood events that come with each record")
    parser.add_argument("--radar", type=int, default=0, help="radar pictures that come with each record")
    parser.add_argument("--decays", type=int, default=0, help="averaged models to keep")
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse())
