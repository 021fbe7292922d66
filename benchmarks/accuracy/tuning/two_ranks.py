"""Data-parallel training of an MLP on two ranks."""

import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--rows", type=int, default=256)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument(
    "--slow-disk-ms", type=float, default=0, help="what the second rank's disk takes per batch"
)
parser.add_argument("--extra-rounds", type=int, default=0, help="further passes of the second rank")
parser.add_argument("--network-ms", type=float, default=0, help="what the network takes per bucket")
parser.add_argument("--averages", type=int, default=0, help="averages of the weights on the first rank")
parser.add_argument("--find-unused", action="store_true")
parser.add_argument("--sync-each", action="store_true")
parser.add_argument("--bucket-mb", type=float, default=25)
parser.add_argument("--reduce-metrics", type=int, default=0, help="numbers averaged over ranks each step")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [layer for _ in range(args.depth) for layer in (nn.Linear(args.width, args.width), nn.ReLU())]
model = DistributedDataParallel(
    nn.Sequential(*layers, nn.Linear(args.width, 1)),
    find_unused_parameters=args.find_unused,
    bucket_cap_mb=args.bucket_mb,
)


def over_slow_network(_, bucket):
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def arrive(future):
        time.sleep(args.network_ms / 1000)
        return future.value()[0] / dist.get_world_size()

    return reduced.then(arrive)


if args.network_ms:
    model.register_comm_hook(None, over_slow_network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


averages = [[p.detach().clone() for p in model.parameters()] for _ in range(0 if rank else args.averages)]


def update_averages(decay=0.99):
    for average in averages:
        for old, new in zip(average, model.parameters(), strict=True):
            old.mul_(decay).add_(new.detach(), alpha=1 - decay)


def load(step):
    if rank == 1 and args.slow_disk_ms:
        time.sleep(args.slow_disk_ms / 1000)
    generator = torch.Generator().manual_seed(step)
    return torch.randn(args.rows, args.width, generator=generator)


for step in range(args.steps):  # the training loop
    for part in range(args.accumulate):
        last = part == args.accumulate - 1
        apart = args.accumulate > 1 and not args.sync_each and not last
        with model.no_sync() if apart else contextlib.nullcontext():
            x = load(step)
            out = model(x)
            for _ in range(args.extra_rounds if rank else 0):
                out = out + 0 * model.module(x)
            out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    update_averages()
    for _ in range(args.reduce_metrics):
        dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
