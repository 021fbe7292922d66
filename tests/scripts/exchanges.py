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


def meet(name, *values, about="it", step=7, dear=False, late_s=(), epoch=False):
    """Makes a group, exchanges values, and takes all apart; returns what came of each exchange.

    Of `late_s` the odd rank comes so many seconds late to each exchange.
    """
    ended, late_s = [], list(late_s)
    ranks = GlooRanks(lambda: step, lambda: ended.append(name))
    ranks.install()
    ranks.an_epoch_begins = epoch
    assert ranks.exchange(about, "alone") == ["alone"], "nobody else is known yet"
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/{name}", rank=RANK, world_size=NUM)
    begun, told = time.monotonic(), []
    for value in values:
        try:
            if value is LEAVES:
                ranks.leave("it has had enough")
            if late_s and odd:
                time.sleep(late_s.pop(0))
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
os.environ["DIAGNOSE_RANKS_WAIT_S"] = "2"
results["late"] = meet("late", 1, 2, late_s=(1.2, 2.6))
results["late where an epoch begins"] = meet("epoch", 1, late_s=(2.6,), epoch=True)
print(json.dumps(results))
