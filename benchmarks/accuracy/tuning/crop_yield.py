"""Predicts the yield of fields from satellite scenes, with gradient accumulation on several ranks."""

import argparse
import zlib
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler

BANDS, SIDE = 4, 32
PER_RANK, MICRO = 48, 6


class Scenes(Dataset):
    """A sample a day: the scene or a composite of several days, the cell of the grid, the yield."""

    def __init__(self, rng, cells, days=0, count=384):
        raw = rng.integers(0, 10000, (count, BANDS, SIDE, SIDE), dtype=np.int16)
        self.days = days
        self.archive = [zlib.compress(scene.tobytes(), 1) for scene in raw] if days else []
        self.tiles = torch.from_numpy(raw.astype(np.float32) / 10000)
        self.cells = rng.integers(0, cells, count).tolist()
        self.yields = self.tiles.mean((2, 3)).sum(1)

    def __len__(self):
        return len(self.tiles)

    def composite(self, index):
        total = np.zeros((BANDS, SIDE, SIDE), dtype=np.float32)
        for day in range(self.days):
            scene = zlib.decompress(self.archive[(index - day) % len(self.archive)])
            total += np.frombuffer(scene, dtype=np.int16).reshape(total.shape)
        return torch.from_numpy(total / (10000 * self.days))

    def __getitem__(self, index):
        tile = self.composite(index) if self.days else self.tiles[index]
        return tile, self.cells[index], self.yields[index]


def conv(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(8, outputs),
        nn.ReLU(inplace=True),
    )


class YieldNet(nn.Module):
    def __init__(self, cells):
        super().__init__()
        self.image = nn.Sequential(conv(BANDS, 24, 2), conv(24, 48, 2), conv(48, 96, 1))
        self.soil = nn.Embedding(cells, 64)
        self.head = nn.Sequential(nn.Linear(96 + 64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, tiles, cells):
        seen = self.image(tiles).mean((2, 3))
        return self.head(torch.cat([seen, self.soil(cells)], 1)).squeeze(1)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cells", type=int, default=500, help="cells of the soil grid")
    parser.add_argument("--always-sync", action="store_true")
    parser.add_argument("--days", type=int, default=0, help="days in a composite of the northern archive")
    parser.add_argument("--rest", type=int, default=0, help="tiles that the last rank takes on top")
    return parser.parse_args()


def train(args, rank, world):
    torch.manual_seed(3)
    model = DistributedDataParallel(YieldNet(args.cells))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    last_rank = rank == world - 1
    torch.manual_seed(100 + rank)
    scenes = Scenes(np.random.default_rng(rank), args.cells, days=args.days if last_rank else 0)
    size = PER_RANK + (args.rest if last_rank else 0)
    sampler = RandomSampler(scenes, replacement=True, num_samples=size * args.steps)
    loader = DataLoader(scenes, batch_size=size, sampler=sampler)

    for step, batch in enumerate(loader, 1):  # the training loop
        optimizer.zero_grad()
        parts = zip(*(column.tensor_split(MICRO) for column in batch), strict=False)
        for number, (tiles, cells, yields) in enumerate(parts, 1):
            sync = args.always_sync or number == MICRO
            with nullcontext() if sync else model.no_sync():
                loss = nn.functional.huber_loss(model(tiles, cells), yields) / MICRO
                loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item() * MICRO:.4f}", flush=True)


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(args, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
