"""Exchanges values between ranks in several ways; each rank prints what it got as one line of JSON.

RANK=0 WORLD_SIZE=3 python -m tests.scripts.exchanges FOLDER
"""

import json
import os
import sys
import time

import torch.distributed as dist

from diagnose.launch.ranks import GlooRanks
from diagnose.tuner.agreement import RanksLost

FOLDER, RANK, NUM = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def meet(name, *values, about="it", step=7, dear=False):
    """Makes a group, exchanges values, and takes all apart; returns what came of each exchange."""
    ended = []
    ranks = GlooRanks(lambda: step, lambda: ended.append(name))
    ranks.install()
    assert ranks.exchange(about, "alone") == ["alone"], "nobody else is known yet"
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/{name}", rank=RANK, world_size=NUM)
    begun, told = time.monotonic(), []
    for value in values:
        try:
            if value is LEAVES:
                ranks.leave("it has had enough")
            told.append(ranks.exchange(about, value, dear=dear))
        except RanksLost as lost:
            told.append(str(lost))
    took_s = time.monotonic() - begun
    dist.barrier()
    dist.destroy_process_group()
    ranks.close()
    return {"told": told, "took_s": took_s, "ended": ended, "rank": ranks.rank}


LEAVES = object()
odd = RANK == 1
results = {
    "values": meet("values", RANK, {"a": [1.5, None, True]}, ["long" * 4000] if odd else "short"),
    "many": meet("many", *[[RANK, number] for number in range(200)]),
    "another plan": meet("about", 1, 2, about="that" if odd else "it"),
    "another step": meet("steps", 1, step=8 if odd else 7),
    "leaves": meet("leaves", 1, LEAVES if odd else 2, 3),
}
print(json.dumps(results))
