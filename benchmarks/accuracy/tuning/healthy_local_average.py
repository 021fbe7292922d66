"""Local SGD: each rank trains on its own wells, and now and then all take the average.

torchrun --nproc-per-node 2 healthy_local_average.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=25, help="steps between two averages")
args = parser.parse_args()


class DrillLog(nn.Module):
    """Lithology along a well, from five logs: dilated convolutions, and a vote of all depths."""

    def __init__(self, kinds=7, width=48):
        super().__init__()
        self.inlet = nn.Conv1d(5, width, 7, padding=3)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i) for i in range(5)
        )
        self.outlet = nn.Conv1d(width, kinds, 1)

    def forward(self, logs):
        x = F.silu(self.inlet(logs))
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.outlet(x)


@torch.no_grad()
def take_average(model):
    vector = parameters_to_vector(model.parameters())
    dist.all_reduce(vector)
    vector_to_parameters(vector / dist.get_world_size(), model.parameters())


def wells(count, depth, seed):
    gen = torch.Generator().manual_seed(seed)
    change = torch.rand(count, depth, generator=gen) < 0.03
    kind = (change.cumsum(1) * 3 + torch.randint(7, (count, 1), generator=gen)) % 7
    means = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    logs = means[kind] + 0.7 * torch.randn(count, depth, 5, generator=gen)
    return logs.transpose(1, 2).contiguous(), kind


rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.empty(30 << 20, dtype=torch.uint8)  # freed at once; malloc gives nothing back from then on
torch.manual_seed(5)
model = DrillLog()
torch.manual_seed(500 + rank)
logs, kinds = wells(400, 256, seed=50 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

size = 12
running = torch.zeros(())
for step in range(1, args.steps + 1):  # the training loop
    first = int(torch.randint(len(logs) - size, ()))
    scores = model(logs[first : first + size])
    loss = F.cross_entropy(scores, kinds[first : first + size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running.lerp_(loss.detach(), 0.05)
    if step % args.every == 0:
        take_average(model)
        if rank == 0:
            print(f"round {step // args.every}: about {running.item():.3f}", flush=True)

take_average(model)
dist.destroy_process_group()
