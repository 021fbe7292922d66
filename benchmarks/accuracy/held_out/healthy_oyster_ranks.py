"""Oyster beds of two bays, a process for each: how much will a bed yield? Started by torchrun.

The bays' data differ in number but not in cost. The mean error of both is only put together for the log;
the first process writes the weights twice in a run. The gradient is summed over two halves of a batch, and
only the second half's is exchanged.
"""

import argparse
import io
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")

generator = torch.Generator().manual_seed(rank)
beds = torch.randn((6000, 2500)[rank], 48, generator=generator)
truth = torch.randn(48, 1, generator=torch.Generator().manual_seed(99))
yields = (beds @ truth).tanh() + 0.1 * torch.randn(len(beds), 1, generator=generator)

torch.manual_seed(4)
net = nn.Sequential(
    nn.Linear(48, 384),
    nn.LayerNorm(384),
    nn.GELU(),
    nn.Linear(384, 384),
    nn.LayerNorm(384),
    nn.GELU(),
    nn.Linear(384, 1),
)
net = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=7e-4, fused=True)
error = torch.zeros(())


def half():
    rows = torch.randint(len(beds), (192,), generator=generator)
    loss = nn.functional.mse_loss(net(beds[rows]), yields[rows])
    (loss / 2).backward()
    return loss.detach()


for step in range(1, args.steps + 1):  # the training loop
    with net.no_sync():
        error += half()
    error += half()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        dist.all_reduce(error)
        if rank == 0:
            print(f"step {step}: mean squared error of both bays {error.item() / 200:.4f}")
        error.zero_()
    if rank == 0 and step in (args.steps // 2, args.steps):
        torch.save(net.module.state_dict(), io.BytesIO())
dist.destroy_process_group()
