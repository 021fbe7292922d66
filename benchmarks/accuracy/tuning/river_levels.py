"""Forecasts tomorrow's water level at river gauges, one half of the catchments per rank.

torchrun --nproc-per-node 2 river_gauges.py --steps 200
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DAYS, SENSORS, WIDTH, ROWS = 48, 12, 256, 640


class Forecaster(nn.Module):
    def __init__(self, gauges, rounds):
        super().__init__()
        self.gauge = nn.Embedding(gauges, WIDTH)
        self.enter = nn.Linear(SENSORS * DAYS, WIDTH)
        self.middle = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.route = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.rounds = rounds

    def forward(self, series, gauge):
        x = F.relu(self.enter(series.flatten(1)) + self.gauge(gauge))
        for layer in self.middle:
            x = x + F.relu(layer(x))
        # the water of the upper reaches arrives later: relax the hidden state
        for _ in range(self.rounds):
            x = x + 0.1 * torch.tanh(self.route(x))
        return self.head(x)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pieces", type=int, default=2, help="micro-batches per step")
    parser.add_argument(
        "--classic", action="store_true", help="the accumulation loop of the one-process version"
    )
    parser.add_argument(
        "--alpine",
        type=int,
        default=0,
        help="more relaxation rounds for the steep catchments, which are on rank 1",
    )
    parser.add_argument(
        "--private-wells", type=int, default=0, help="so many hundred wells get an embedding too"
    )
    return parser.parse_args()


def main():
    args = parse()
    rank = int(os.environ.get("RANK", 0))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)

    gauges = 200 + 100 * args.private_wells
    model = Forecaster(gauges, 1 + (args.alpine if rank == 1 else 0))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.003, momentum=0.9, fused=True)

    make = torch.Generator().manual_seed(100 + rank)
    series = torch.randn(2048, SENSORS, DAYS, generator=make).cumsum(-1) * 0.1
    where = torch.randint(gauges, (2048,), generator=make)
    level = torch.stack([series[:, 0, -1], series[:, 1].amax(-1), series[:, :3].mean((1, 2))], 1)

    def pieces():
        pick = torch.randint(2048, (ROWS,), generator=make)
        return zip(
            *(torch.tensor_split(t[pick], args.pieces) for t in (series, where, level)), strict=False
        )

    for step in range(args.steps):  # the training loop
        if args.classic:
            for x, g, y in pieces():
                loss = F.smooth_l1_loss(ddp(x, g), y) / args.pieces
                loss.backward()
        else:
            for i, (x, g, y) in enumerate(pieces()):
                last = i == args.pieces - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss = F.smooth_l1_loss(ddp(x, g), y) / args.pieces
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item() * args.pieces:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
