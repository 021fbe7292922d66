"""A data-parallel autoencoder, two processes."""

import argparse
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Coder(nn.Module):
    def __init__(self, size, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def worse_wire(delay):
    def hook(state, bucket):
        sent = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)

        def received(done):
            time.sleep(delay)
            return done.value()[0]

        return sent.get_future().then(received)

    return hook


def main(a):
    dist.init_process_group("gloo")
    me = dist.get_rank()
    torch.manual_seed(7)
    ddp = DDP(Coder(a.size, a.layers), find_unused_parameters=a.unused, bucket_cap_mb=a.bucket)
    if a.wire:
        ddp.register_comm_hook(None, worse_wire(a.wire / 1000))
    opt = torch.optim.SGD(ddp.parameters(), 1e-3)
    shadows = [[t.detach().clone() for t in ddp.parameters()] for _ in range(a.shadow if me else 0)]
    for _ in range(a.steps):  # the training loop
        opt.zero_grad()
        for micro in range(a.micro):
            if me == 0 and a.fetch:
                time.sleep(a.fetch / 1000)
            x = torch.rand(a.rows * (1 + (a.longer if me == 0 else 0)), a.size)
            quiet = a.micro > 1 and micro < a.micro - 1 and not a.chatty
            with ddp.no_sync() if quiet else nullcontext():
                nn.functional.mse_loss(ddp(x), x).backward()
        opt.step()
        for shadow in shadows:
            for kept, tensor in zip(shadow, ddp.parameters(), strict=True):
                kept.copy_(0.9 * kept + 0.1 * tensor.detach())
        for _ in range(a.barriers):
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=110)
    p.add_argument("--size", type=int, default=160)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--rows", type=int, default=192)
    p.add_argument("--micro", type=int, default=1)
    p.add_argument("--fetch", type=float, default=0, help="milliseconds to fetch on the first rank")
    p.add_argument("--longer", type=int, default=0, help="how much more the first rank is given")
    p.add_argument("--wire", type=float, default=0, help="milliseconds on the wire per bucket")
    p.add_argument("--shadow", type=int, default=0, help="moving copies of the weights, on the second rank")
    p.add_argument("--unused", action="store_true")
    p.add_argument("--chatty", action="store_true")
    p.add_argument("--bucket", type=float, default=25)
    p.add_argument("--barriers", type=int, default=0)
    main(p.parse_args())
