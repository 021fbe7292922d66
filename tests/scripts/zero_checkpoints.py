"""Trains on every rank; the first one alone saves now and then, and once more when the others have ended.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python zero_checkpoints.py STEPS
"""

import hashlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1])


def digest(*tensors):
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().numpy().tobytes())
    return made.hexdigest()[:16]


def checkpoint():
    """Returns a digest of what a script would save."""
    saved = optimizer.state_dict()["state"]
    return digest(*(value for state in saved.values() for value in state.values()))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
seen = []
for step in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(8, 64, generator=generator)).square().mean().backward()
    optimizer.step()
    time.sleep(0.004)
    if rank == 0 and step % 50 == 49:
        seen.append(checkpoint())
if rank == 0:
    time.sleep(1)
    seen.append(checkpoint())
print(f"rank {rank} weights {digest(*model.parameters())} checkpoints {' '.join(seen)}", flush=True)
