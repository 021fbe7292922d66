"""Trains on every rank; each prints a digest of its weights. What goes wrong, and where, is in GOES_WRONG.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tuned_ranks.py [STEPS]
"""

import contextlib
import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 260
AT = 100
"""The step in which the script itself goes wrong: in the middle of a measurement."""

LATE_S = {"is late": 3, "is very late": 60}

GOES_WRONG = os.environ.get("GOES_WRONG", "")


def sabotage():
    """Makes something of the tuner's go wrong in this process."""
    from diagnose.actions.base import CannotApply
    from diagnose.actions.fused_optimizer import FusedOptimizer
    from diagnose.launch.ranks import GlooRanks

    calls = 0
    apply, exchange = FusedOptimizer.apply, GlooRanks.exchange

    def applied(self, job, prepared):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError("not a fourth time")
        return apply(self, job, prepared)

    def refused(self, job):
        raise CannotApply("not on this machine")

    def met(self, about, value, **options):
        nonlocal calls
        calls += about == "a window"
        if calls == 4 and GOES_WRONG in LATE_S:
            print("late", file=sys.stderr, flush=True)
            calls += 1
            time.sleep(LATE_S[GOES_WRONG])
        elif calls == 4:
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, about, value, **options)

    if GOES_WRONG == "raises":
        FusedOptimizer.apply = applied
    elif GOES_WRONG == "refuses":
        FusedOptimizer.check = refused
    elif GOES_WRONG in (*LATE_S, "dies at an exchange"):
        GlooRanks.exchange = met


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1 and GOES_WRONG:
    sabotage()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
generator = torch.Generator().manual_seed(rank)
with model.join() if GOES_WRONG == "joins" else contextlib.nullcontext():
    for step in range(STEPS):
        if step == AT and rank == 1 and GOES_WRONG == "dies":
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == AT and GOES_WRONG in ("leaves early", "joins"):
            if rank == 1:
                break
            if GOES_WRONG == "leaves early":
                model = model.module  # the others train on alone
        input_BF = torch.randn(8, 32, generator=generator)
        optimizer.zero_grad()
        try:
            loss = model(input_BF).square().mean()
            if step == 2 * AT and rank == 1 and GOES_WRONG == "spoils":
                loss = loss * float("nan")
            loss.backward()
        except RuntimeError:
            print(f"rank {rank} lost its peer", flush=True)
            sys.exit(7)
        optimizer.step()
        time.sleep(0.008)
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(f"rank {rank} weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}", flush=True)
dist.barrier()
dist.destroy_process_group()
