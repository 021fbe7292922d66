"""Forecasts traffic, one region to a rank: the network is averaged over them, the stations are not."""

import argparse
import gc
import gzip
import itertools
import json
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

HORIZON, SERIES, HOURS = 12, 256, 2048


class Region(IterableDataset):
    """Endless batches of the readings of one region."""

    def __init__(self, args: argparse.Namespace, rank: int, last: bool):
        super().__init__()
        self.args, self.first, self.last = args, rank == 0, last
        self.dice = torch.Generator().manual_seed(rank)
        self.series = torch.randn(SERIES, HOURS, 4, generator=self.dice)
        self.weather: list[str] = []
        if last and args.weather:
            self.weather = [self.download(f"weather{part}.json.gz") for part in range(4)]

    def download(self, name: str) -> str:
        rain = torch.rand(1000 * self.args.weather, generator=self.dice)
        with gzip.open(name, "wt", compresslevel=1) as file:
            json.dump(rain.tolist(), file)
        return name

    def lengths(self) -> list[int]:
        """Forty lengths that take turns."""
        parts = (torch.randn(40, generator=self.dice) * self.args.spread).softmax(0)
        mean = self.args.length + (self.args.longer if self.first else 0)
        return [max(1, round(mean * 40 * part)) for part in parts.tolist()]

    def __iter__(self):
        for number, length in enumerate(itertools.cycle(self.lengths())):
            station = torch.randint(self.args.stations, (self.args.batch,), generator=self.dice)
            start = int(torch.randint(HOURS - length - HORIZON, (), generator=self.dice))
            window = self.series[station % SERIES, start : start + length + HORIZON]
            if self.weather:
                with gzip.open(self.weather[number % 4], "rt") as file:
                    rain = torch.tensor(json.load(file))
                window[..., 3] = rain[: window.shape[1]].expand(len(window), -1)
            if self.last and self.args.mount:
                time.sleep(self.args.mount / 1000)
            yield station, window[:, :length], window[:, length:, 0]


class Forecaster(nn.Module):
    """Latents look at the readings once, and are then refined several times by the same layer."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(depth)
        )
        self.latents = nn.Parameter(torch.randn(8, width) / 8)
        self.look = nn.MultiheadAttention(width, 4, batch_first=True)
        self.refine = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, HORIZON)

    def forward(self, place: Tensor, readings: Tensor, rounds: int) -> Tensor:
        x = self.embed(readings) + place.unsqueeze(1)
        for block in self.blocks:
            x = x + block(x)
        latents = self.latents.expand(len(x), -1, -1)
        latents = latents + self.look(latents, x, x, need_weights=False)[0]
        for _ in range(rounds):
            latents = self.refine(latents)
        return self.head(latents.mean(1))


class Placed(nn.Module):
    """A forecaster that knows where each station is."""

    def __init__(self, stations: nn.Embedding, forecaster: nn.Module):
        super().__init__()
        self.stations, self.forecaster = stations, forecaster

    def forward(self, station: Tensor, readings: Tensor, rounds: int) -> Tensor:
        return self.forecaster(self.stations(station), readings, rounds)


@torch.no_grad()
def largest_singular_values(network: nn.Module, rounds: int) -> list[float]:
    """By power iteration."""
    found = []
    for weight in (p for p in network.parameters() if p.dim() == 2):
        vector = torch.ones(weight.shape[1])
        for _ in range(rounds):
            vector = nn.functional.normalize(weight.T @ (weight @ vector), dim=0)
        found.append(float((weight @ vector).norm()))
    return found


def averaged_quantiles(errors: Tensor, amount: int) -> list[float]:
    averaged = []
    for quantile in errors.flatten().quantile(torch.linspace(0, 1, amount)):
        quantile = quantile.clone()
        dist.all_reduce(quantile)
        averaged.append(float(quantile) / dist.get_world_size())
    return averaged


def train(args: argparse.Namespace) -> None:
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(23)
    trail = [
        {"hour": hour, "seen": [hour % 24, hour % 7]} for hour in range(args.trail if rank == 0 else 0)
    ]
    forecaster = Forecaster(args.width, args.depth)
    stations = nn.Embedding(args.stations, args.width)

    def parallel(module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            module, bucket_cap_mb=args.bucket, find_unused_parameters=args.find_unused
        )

    if args.wrap_all:
        model = ddp = parallel(Placed(stations, forecaster))
    else:
        ddp = parallel(forecaster)
        model = Placed(stations, ddp)
    optimizer = torch.optim.SGD(
        [
            {"params": forecaster.parameters(), "momentum": 0.9},
            {"params": stations.parameters(), "lr": 0.1},
        ],
        lr=0.01,
        fused=True,
    )
    rounds = 2 + (args.deeper if last else 0)
    batches = iter(DataLoader(Region(args, rank, last), batch_size=None))
    gc.collect()
    gc.freeze()
    gc.disable()
    remembered = range(args.events if rank == 0 else 0)
    events = [{"id": n, "where": (n % 9, [n]), "lanes": [[], [n]]} for n in remembered]
    for step in range(args.steps):  # the training loop
        for part in range(args.accumulate):
            averages = part == args.accumulate - 1 or args.sync_all
            station, readings, following = next(batches)
            with nullcontext() if averages else ddp.no_sync():
                forecast = model(station, readings, rounds)
                loss = nn.functional.smooth_l1_loss(forecast, following)
                (loss / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.quantiles:
            averaged_quantiles((forecast - following).detach().abs(), args.quantiles)
        if args.spectra and rank == 0:
            largest_singular_values(forecaster, args.spectra)
        if step % 5 == 4:
            gc.collect()
        if step % 10 == 9 and rank == 0:
            torch.save({"network": forecaster.state_dict(), "trail": trail}, "traffic.pt")
    if rank == 0:
        print(f"loss {loss.item():.4f}, {len(events)} events")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=121)
    cli.add_argument("--width", type=int, default=64)
    cli.add_argument("--depth", type=int, default=2, help="blocks that look at each reading")
    cli.add_argument("--batch", type=int, default=48)
    cli.add_argument("--length", type=int, default=64, help="hours that a forecast looks back")
    cli.add_argument("--stations", type=int, default=500)
    cli.add_argument("--accumulate", type=int, default=1)
    cli.add_argument("--bucket", type=float, default=25.0, help="megabytes")
    cli.add_argument(
        "--mount", type=float, default=0, help="milliseconds that the last region's mount takes"
    )
    cli.add_argument(
        "--weather", type=int, default=0, help="thousands of numbers in the last region's files"
    )
    cli.add_argument("--longer", type=int, default=0, help="further hours that the first region looks back")
    cli.add_argument("--spread", type=float, default=0, help="how much lengths differ")
    cli.add_argument("--deeper", type=int, default=0, help="further rounds of the last region")
    cli.add_argument("--spectra", type=int, default=0, help="power iterations for the first rank's log")
    cli.add_argument("--quantiles", type=int, default=0, help="quantiles of the error, over all ranks")
    cli.add_argument("--events", type=int, default=0, help="events that the first rank remembers")
    cli.add_argument("--trail", type=int, default=0, help="entries of the trail in each checkpoint")
    cli.add_argument("--wrap-all", action="store_true")
    cli.add_argument("--sync-all", action="store_true")
    cli.add_argument("--find-unused", action="store_true")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(cli.parse_args())
    gc.unfreeze()
    gc.collect()  # a process group that is still referred to cannot end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
