"""Trains a tiny model on every rank that torchrun starts; rank 0 prints the sum of the weights in full.

torchrun --nproc-per-node 2 two_ranks.py [STEPS]
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    input_BF = torch.randn(4, 8)
    optimizer.zero_grad()
    model(input_BF).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)
if dist.get_rank() == 0:
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print("weights", weights.sum().item().hex(), flush=True)
dist.destroy_process_group()
sys.exit(int(os.environ.get("EXIT_CODE", "0")))
