"""Which product comes next into the basket? Embeddings, data-parallel.

torchrun --nproc_per_node=2 shop_baskets.py --steps 500
"""

import argparse
import contextlib
import os
import zlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

PRODUCTS, BASKET, MICRO = 4000, 16, 6


class NextProduct(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.products = nn.Embedding(PRODUCTS, dim)
        self.mix = nn.Sequential(nn.Linear(dim, 256), nn.GELU(), nn.Linear(256, dim), nn.LayerNorm(dim))
        self.bias = nn.Parameter(torch.zeros(PRODUCTS))
        nn.init.normal_(self.products.weight, std=0.05)

    def forward(self, baskets):
        x = self.mix(self.products(baskets).mean(1))
        return F.linear(x, self.products.weight, self.bias)


class Shard:
    """The receipts of one rank: products of the basket, and then the one that came last.

    Receipts of the last shop arrive as they were archived, one packed file a day.
    """

    def __init__(self, rank, seed, packed, last):
        rng = np.random.default_rng(seed + rank)
        taste = rng.integers(0, PRODUCTS - 50, (20_000, 1))
        self.receipts = torch.from_numpy(taste + rng.integers(0, 50, (20_000, BASKET + 1)))
        self.days = []
        if packed and last:
            for day in range(32):
                part = self.receipts[day * 600 : (day + 1) * 600].numpy().astype(np.int32)
                self.days.append(zlib.compress(part.tobytes(), 6))
        self.packed = packed
        self.day = 0

    def unpack(self):
        days = []
        for _ in range(self.packed):
            raw = zlib.decompress(self.days[self.day % len(self.days)])
            days.append(np.frombuffer(raw, np.int32).reshape(-1, BASKET + 1))
            self.day += 1
        return days

    def __iter__(self):
        return self

    def __next__(self):
        rows = torch.randint(len(self.receipts), (MICRO * 48,))
        batch = self.receipts[rows]
        if self.days:
            days = self.unpack()
            for i in range(0, len(batch), 48):
                day = days[i // 48 % len(days)]
                first = (i * 7) % (len(day) - 48)
                batch[i : i + 48] = torch.from_numpy(day[first : first + 48].astype(np.int64))
        return batch.chunk(MICRO)


def by_aisle(logits, targets, aisles):
    """The loss in each aisle of the shop, over all ranks, for the buyers' dashboard."""
    with torch.no_grad():
        losses = F.cross_entropy(logits, targets, reduction="none")
        aisle = targets % aisles
        sums = torch.zeros(aisles).index_add_(0, aisle, losses)
        counts = torch.zeros(aisles).index_add_(0, aisle, torch.ones_like(losses))
    for i in range(aisles):
        pair = torch.stack([sums[i], counts[i]])
        dist.all_reduce(pair)
        sums[i] = pair[0] / pair[1].clamp(min=1)
    return sums


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--aisles", type=int, default=0, help="follow the loss in so many aisles")
    parser.add_argument(
        "--packed", type=int, default=0, help="archived days behind each batch of the last shop"
    )
    parser.add_argument(
        "--noise",
        type=int,
        default=0,
        help="estimate the gradient noise from so many micro-batches, at most 5",
    )
    args = parser.parse_args()

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = DistributedDataParallel(NextProduct(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, fused=True)
    torch.manual_seed(100 + rank)
    data = Shard(rank, 5, args.packed, rank == dist.get_world_size() - 1)
    aisles = None
    noise = 0.0

    for step in range(1, args.steps + 1):  # the training loop
        micro = next(data)
        for i, receipts in enumerate(micro):
            baskets, targets = receipts[:, :-1], receipts[:, -1]
            # the noise scale wants the norm of the mean over all ranks after each of the first micro-batches
            whole = i == MICRO - 1 or i < args.noise
            with contextlib.nullcontext() if whole else model.no_sync():
                logits = model(baskets)
                loss = F.cross_entropy(logits, targets) / MICRO
                loss.backward()
            if i < args.noise:
                noise += model.module.bias.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
        if args.aisles:
            now = by_aisle(logits.detach(), targets, args.aisles)
            aisles = now if aisles is None else torch.lerp(aisles, now, 0.05)
        if step % 50 == 0 and rank == 0:
            print(f"{step}: {loss.item() * MICRO:.3f}", flush=True)
            if args.aisles:
                print("   worst aisle", int(aisles.argmax()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
