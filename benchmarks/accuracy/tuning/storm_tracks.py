"""Where does a storm go next? A model of tracks, trained by torchrun on two ranks.

Hindcasts of the last 24 positions, four features each; answers are the next three displacements.
"""

import argparse
import collections
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

OCEANS = ["atlantic", "east pacific", "west pacific", "north indian", "south indian", "australia"]


def tracks(count, rng):
    heading = rng.uniform(0, 2 * np.pi, (count, 1)) + np.cumsum(0.15 * rng.standard_normal((count, 27)), 1)
    speed = np.abs(5 + np.cumsum(0.4 * rng.standard_normal((count, 27)), 1))
    move = np.stack([speed * np.cos(heading), speed * np.sin(heading)], 2) / 10
    wind = np.cumsum(rng.standard_normal((count, 27, 2)), 1) / 5
    past = np.concatenate([move[:, :24], wind[:, :24]], 2)
    return torch.from_numpy(past.astype(np.float32)), torch.from_numpy(
        move[:, 24:].reshape(count, 6).astype(np.float32)
    )


class Tracker(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(96, dim), nn.ReLU(), nn.Linear(dim, 2 * dim), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, 6))

    def forward(self, x):
        return self.head(self.body(x))


def record(book, miss, regions):
    """Mean miss by region, as each rank has seen it; rank 0 keeps the book."""
    for region in range(regions):
        part = miss[region % len(miss) :: regions]
        mine = {"ocean": OCEANS[region % len(OCEANS)], "storms": len(part), "miss": float(part.mean())}
        all_of_them = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, mine)
        for entry in all_of_them:
            book[region, entry["ocean"]].append(entry["miss"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--split", type=int, default=0, help="work through a batch in so many parts, to save memory"
    )
    parser.add_argument("--regions", type=int, default=0, help="keep book of the misses in so many regions")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(13)
    past, future = tracks(10_000, np.random.default_rng(rank))
    model = DDP(Tracker(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.5)
    book = collections.defaultdict(lambda: collections.deque(maxlen=50))
    generator = torch.Generator().manual_seed(rank)

    for step in range(args.steps):  # the training loop
        rows = torch.randint(len(past), (args.batch,), generator=generator)
        optimizer.zero_grad()
        for part in rows.chunk(max(args.split, 1)):
            off = model(past[part]) - future[part]
            loss = off.square().sum() / (6 * args.batch)
            loss.backward()
        optimizer.step()
        scheduler.step()
        if args.regions:
            record(book, off.detach().abs().mean(1), args.regions)
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
