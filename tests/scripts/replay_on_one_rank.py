"""Two ranks under DDP, their calls behind one node; memory runs out on one of them, in both passes.

Prints how far the weights are from those of the same training without.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diagnose.actions._boundary import Segment
from diagnose.actions._pieces import Pieces
from diagnose.actions.oom_replay import Replaying

LADDER = (("pieces", 2), ("pieces", 4))
FAILS = {"forward": {3}, "backward": {5}}
COUNTS = {"forward": 0, "backward": 0}


class Starved(torch.autograd.Function):
    """Raises as CUDA does."""

    armed = False

    @staticmethod
    def forward(ctx, rows):
        Starved.count("forward")
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        Starved.count("backward")
        return gradient

    @staticmethod
    def count(way):
        COUNTS[way] += 1
        if Starved.armed and COUNTS[way] in FAILS[way]:
            raise torch.OutOfMemoryError("CUDA out of memory")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 4)
        self.register_buffer("scale", torch.ones(()))  # which DDP sends around in each forward pass

    def forward(self, rows):
        return self.head(Starved.apply(self.body(rows))) * self.scale


def train(route, rank, accumulate):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for _ in range(8):
        for last in [False] * (accumulate - 1) + [True]:
            model.require_backward_grad_sync = last
            rows = torch.randn(12, 8, dtype=torch.float64)
            route(lambda model, *args: model(*args), (model, rows), {}).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main():
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    ways = {
        "segment": lambda *call: Segment(*call).run(),
        "pieces": lambda *call: Pieces(*call, 3).run(),
        "replay": lambda *call: Replaying(*call, LADDER).run(),
    }
    for accumulate in (1, 2):
        plain = train(lambda call, args, kwargs: call(*args, **kwargs), rank, accumulate)
        for name, route in ways.items():
            COUNTS.update(forward=0, backward=0)
            Starved.armed = name == "replay" and rank == 1
            weights = train(route, rank, accumulate)
            Starved.armed = False
            both = [torch.empty_like(weights) for _ in range(2)]
            torch.distributed.all_gather(both, weights)
            apart = float((both[0] - both[1]).abs().max())
            if rank == 0:
                print(name, accumulate, f"{float((weights - plain).abs().max()):.0e}", f"{apart:.0e}")


main()
