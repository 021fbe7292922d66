"""Trains two ranks, each on every other row of a data set: epochs of 51 batches and of 50, a step for each
four batches. Each prints a digest of its weights.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python uneven_ranks.py [STEPS]
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
ACCUMULATE = 4

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(torch.randn(101, 32)[rank::2], batch_size=1)
passes = 0
while passes < ACCUMULATE * STEPS:
    for input_BF in loader:
        model(input_BF).square().mean().backward()
        passes += 1
        if passes % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
        if passes == ACCUMULATE * STEPS:
            break
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(f"rank {rank} weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}", flush=True)
dist.barrier()
dist.destroy_process_group()
