"""Forecasts how long each vent of a geyser basin stays quiet, from the tremor of the whole basin.

torchrun --nproc-per-node 2 geyser_basin.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Shared

HOURS, SENSORS, ROWS = 48, 24, 48


class Basin(nn.Module):
    """A GRU listens to the tremor; the answer is a dictionary with a forecast for every vent."""

    def __init__(self, vents, hidden=96):
        super().__init__()
        self.names = [f"vent-{i:04d}" for i in range(vents)]
        self.ear = nn.GRU(SENSORS, hidden, batch_first=True)
        self.middle = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.quiet = nn.Linear(hidden, vents)

    def forward(self, tremor):
        heard, _ = self.ear(tremor)
        quiet = self.quiet(self.middle(heard[:, -1]))
        return dict(zip(self.names, quiet.unbind(1), strict=True))


class Archive:
    """Years of tremor in memory; a record begins at any hour."""

    def __init__(self, vents, seed, hours=6000):
        draw = torch.Generator().manual_seed(seed)
        mixing = torch.randn(SENSORS, vents, generator=torch.Generator().manual_seed(0)) / SENSORS**0.5
        self.tremor = torch.randn(hours, SENSORS, generator=draw).cumsum(0).sin_()
        self.waits = (self.tremor @ mixing).tanh_()
        self.draw = draw

    def record(self):
        starts = torch.randint(len(self.tremor) - HOURS, (ROWS,), generator=self.draw)
        hours = starts[:, None] + torch.arange(HOURS)
        return self.tremor[hours], self.waits[starts + HOURS - 1]


def error(forecast, waits):
    return nn.functional.huber_loss(torch.stack(list(forecast.values()), 1), waits)


@torch.no_grad()
def review(net, archive, records):
    """The mean error on records of another year."""
    net.eval()
    total = sum(error(net(x), y) for x, y in (archive.record() for _ in range(records)))
    net.train()
    return float(total) / records


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vents", type=int, default=60, help="vents in the basin")
    parser.add_argument("--dormant", action="store_true", help="for basins where vents fall asleep")
    parser.add_argument("--reviews", type=int, default=0, help="records of the other year, every 10 steps")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.manual_seed(8)
    net = Basin(args.vents)
    shared = Shared(net, find_unused_parameters=args.dormant, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
    this_year, other_year = Archive(args.vents, 10 + rank), Archive(args.vents, 20 + rank)

    step = 0
    while step < args.steps:  # the training loop
        tremor, waits = this_year.record()
        loss = error(shared(tremor), waits)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        if args.reviews and step % 10 == 0:
            held = review(net, other_year, args.reviews)
            if rank == 0 and step % 50 == 0:
                print(f"   other year {held:.4f}", flush=True)
        if rank == 0 and step % 50 == 0:
            print(f"{step:5d} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
