"""Where does a visitor go next? Two museum doors, one rank each, learn one model of how people wander (torchrun)."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ROOMS, STOPS, SIZE = 48, 16, 48


class Lane(nn.Module):
    """A gated layer along the stops of a trail."""

    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.offset = nn.Parameter(torch.zeros(size))
        self.mix = nn.Linear(STOPS, STOPS)
        self.gate = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.strength = nn.Parameter(torch.full((size,), 0.3))

    def forward(self, x):
        y = F.normalize(x, dim=-1) * self.scale + self.offset
        y = self.mix(y.mT).mT
        return x + self.strength * torch.sigmoid(self.gate(y)) * self.value(y)


class Wanderer(nn.Module):
    def __init__(self, lanes):
        super().__init__()
        self.room = nn.Embedding(ROOMS, SIZE)
        self.lanes = nn.Sequential(*(Lane(SIZE) for _ in range(lanes)))
        self.exit = nn.Linear(SIZE, ROOMS)

    def forward(self, trail):
        return self.exit(self.lanes(self.room(trail))[:, -1])


def trails(door, count):
    """People who mostly follow the signs, and sometimes do not."""
    common = torch.Generator().manual_seed(77)
    signs = torch.stack([torch.randperm(ROOMS, generator=common)[:3] for _ in range(ROOMS)])
    own = torch.Generator().manual_seed(door)
    here = torch.randint(ROOMS, (count,), generator=own)
    path = [here]
    for _ in range(STOPS):
        follow = signs[here, torch.randint(3, (count,), generator=own)]
        stray = torch.randint(ROOMS, (count,), generator=own)
        here = torch.where(torch.rand(count, generator=own) < 0.85, follow, stray)
        path.append(here)
    path = torch.stack(path, 1)
    return path[:, :-1].contiguous(), path[:, -1].contiguous()


def admissions(args, door, dice):
    """How many come in by this door. People off a coach do not split up: all of them use one of the doors."""
    side = 1 if torch.rand((), generator=dice) < 0.5 else -1
    return args.per_door + (args.coach // 2) * (side if door == 0 else -side)


def count_posts(posts, trail, seen):
    """Keeps how many pass each guard's post, a room at some hour, over both doors: for the rota."""
    for post in range(posts):
        hour, room = post // ROOMS % STOPS, post % ROOMS
        visits = (trail[:, hour] == room).sum()
        dist.all_reduce(visits)
        seen[hour, room] += visits


def run(args):
    door = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = DistributedDataParallel(Wanderer(args.lanes), find_unused_parameters=args.tolerant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
    paths, following = trails(door, 8192)
    dice = torch.Generator().manual_seed(9)
    seen = torch.zeros(STOPS, ROOMS, dtype=torch.long)
    first = 0
    for step in range(args.steps):  # the training loop
        visitors = admissions(args, door, dice)
        if first + visitors > len(paths):
            first = 0
        trail, target = paths[first : first + visitors], following[first : first + visitors]
        first += visitors
        loss = F.cross_entropy(model(trail), target, reduction="sum") / args.per_door
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.guards:
            count_posts(args.guards, trail, seen)
        if door == 0 and (step + 1) % 50 == 0:
            print("step", step + 1, "loss", round(loss.item(), 4), flush=True)
    if door == 0 and args.guards:
        print("busiest room:", int(seen.sum(0).argmax()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--per-door", type=int, default=48, help="visitors at a door in each step")
    parser.add_argument("--lanes", type=int, default=10)
    parser.add_argument("--coach", type=int, default=0, help="visitors who come by coach, at most 92")
    parser.add_argument("--guards", type=int, default=0, help="posts with a guard, at most 768")
    parser.add_argument("--tolerant", action="store_true", help="do not mind lanes that sit out")
    run(parser.parse_args())
