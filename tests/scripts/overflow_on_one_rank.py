"""Two ranks under DDP whose loss is scaled; the gradients of one overflow, at last hidden by clipping.

Prints, from the start on and after each step: weights, scale and steps left out.
"""

import json
import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diagnose.actions._careful import Failure
from diagnose.actions._loss_scale import LossScale


def main():
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = f"file://{sys.argv[1]}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = LossScale("cpu", Failure())
    route = scale.through(lambda call, args, kwargs: call(*args, **kwargs))
    told = {"weights": [], "scales": [], "skipped": []}

    def tell():
        told["weights"].append([p.tolist() for p in model.parameters()])
        told["scales"].append(scale.scale)
        told["skipped"].append(scale.num_skipped)

    tell()
    with scale.installed([model], [optimizer]):
        for first in (float("inf"), 1.0, float("inf")):
            rows = torch.tensor([[1.0 if rank else first, 1.0]])
            route(type(model).__call__, (model, rows), {}).sum().backward()
            if len(told["scales"]) == 3:
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tell()
    print(json.dumps(told), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
