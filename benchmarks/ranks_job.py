"""Trains a small language model on each rank; one rank is slower for one reason. For `ranks.py`.

    torchrun --nproc-per-node 2 ranks_job.py --fault backward --rank 1 --ms 15

`--alternate` trains ten steps with communication and ten without, in turn: what a step loses to it is then
measured in one process, whatever else the machine does. `collective` leaves out the collective alone: DDP
still copies the gradients into its buckets. `ddp` leaves out both, as `no_sync` does.
"""

import argparse  # annotations stay objects: DDP looks at those of its hook
import contextlib
import gc
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULTS = ("none", "fetch", "forward", "backward", "gc", "longer", "cpu")
BLOCK = 10
BURN = "import os\nos.sched_setaffinity(0, {int(os.sys.argv[1])})\nwhile os.getppid() != 1: pass"

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=FAULTS, default="none")
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--ms", type=float, default=15.0)
parser.add_argument("--steps", type=int, default=160)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument(
    "--rest-ms", type=float, default=3.0, help="of the forward pass, in which no CPU is used"
)
parser.add_argument("--alternate", choices=["collective", "ddp"])
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, late = dist.get_rank(), dist.get_rank() == args.rank
torch.manual_seed(rank)


class Sentences(Dataset):
    """Sequences of token ids, longer on one rank; reading one batch of them takes long on one rank."""

    def __len__(self) -> int:
        return args.steps * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if late and args.fault == "fetch":
            time.sleep(args.ms / 4000)
        length = 24 if not (late and args.fault == "longer") else round(24 * (1 + args.ms / 5))
        return torch.randint(0, 1000, (length,))


class Model(nn.Module):
    """An embedding and some layers. A part of its forward pass waits, as one on a device does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, args.width)
        self.layers = nn.ModuleList(nn.Linear(args.width, args.width) for _ in range(args.layers))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(ids_BT)
        for layer in self.layers:
            x_BTD = torch.relu(layer(x_BTD))
        time.sleep(args.rest_ms / 1000 * ids_BT.shape[1] / 24)
        if late and args.fault == "forward":
            time.sleep(args.ms / 1000)
        return x_BTD


def averaged(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The gradients of a bucket, averaged over the ranks; its own in a step without communication."""
    if not alone:
        return allreduce_hook(None, bucket)
    own: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    own.set_result(bucket.buffer().div_(dist.get_world_size()))
    return own


alone = False
model = DistributedDataParallel(Model())
if args.alternate == "collective":
    model.register_comm_hook(None, averaged)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
heap: list[list[int]] = []
burning: list[subprocess.Popen[bytes]] = []
if late and args.fault == "backward":
    model.module.layers[0].weight.register_hook(lambda grad: time.sleep(args.ms / 1000))
if late and args.fault == "gc":
    heap = [[i] for i in range(round(args.ms * 2_000))]
if args.fault == "cpu" and hasattr(os, "sched_setaffinity"):
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1]} if late else set(cpus[:-1]))
    if late:
        burner = [sys.executable, "-c", BURN, str(cpus[-1])]
        burning = [subprocess.Popen(burner) for _ in range(4 * dist.get_world_size())]

try:
    for step, ids_BT in enumerate(DataLoader(Sentences(), batch_size=4)):
        alone = args.alternate is not None and step // BLOCK % 2 == 1
        with model.no_sync() if alone and args.alternate == "ddp" else contextlib.nullcontext():
            optimizer.zero_grad(set_to_none=False)
            loss = model(ids_BT).square().mean()
            loss.backward()
        optimizer.step()
        if heap and step % 8 == 0:
            gc.collect()
finally:
    for process in burning:
        process.kill()
        process.wait()
dist.barrier()
dist.destroy_process_group()
