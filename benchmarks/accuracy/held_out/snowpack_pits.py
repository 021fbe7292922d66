"""Snow pits in two halves of a country: is there a weak layer? torchrun starts a process for each half."""

import argparse
import os
import zlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Parallel

DEPTHS, MEASURES = 64, 5


class Half:
    """The pits of one half of the country."""

    def __init__(self, rank, blocks):
        self.rng = np.random.default_rng(100 + rank)
        pits = self.rng.normal(size=(3000, MEASURES, DEPTHS)).astype(np.float32)
        pits = (pits + np.roll(pits, 1, 2) + np.roll(pits, -1, 2)) / 1.7
        self.weak = torch.from_numpy((pits[:, 0].min(1) < -2.2).astype(np.float32))
        self.pits = torch.from_numpy(pits)
        # in the south, remarks of the observers lie in packed blocks
        self.remarks = [
            zlib.compress(self.rng.integers(0, 9, 4096).astype(np.uint8).tobytes()) for _ in range(64)
        ]
        self.blocks = blocks if rank == 1 else 0

    def draw(self, count):
        rows = torch.from_numpy(self.rng.integers(0, len(self.pits), count))
        pits, weak = self.pits[rows], self.weak[rows]
        for number in self.rng.integers(0, len(self.remarks), self.blocks):
            remark = np.frombuffer(zlib.decompress(self.remarks[number]), np.uint8)
            pits[number % count, -1] += float(remark[:64].mean() > 5)
        return pits, weak


class PitNet(nn.Module):
    def __init__(self, wide=64):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(MEASURES, wide, 5, padding=2)])
        for _ in range(3):
            self.layers.append(nn.Conv1d(wide, wide, 5, padding=2))
        self.head = nn.Linear(2 * wide, 1)

    def forward(self, pits):
        for layer in self.layers:
            pits = F.gelu(layer(pits))
        return self.head(torch.cat([pits.amax(2), pits.mean(2)], 1))[:, 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pits", type=int, default=64)
    parser.add_argument("--remarks", type=int, default=0, help="blocks of remarks that go with a draw")
    parser.add_argument("--unsure", type=int, default=0, help="pits for which being too sure costs")
    args = parser.parse_args()

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    half = Half(rank, args.remarks)
    net = Parallel(PitNet())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for step in range(1, args.steps + 1):  # the training loop
        pits, weak = half.draw(args.pits)
        loss = F.binary_cross_entropy_with_logits(net(pits), weak)
        if args.unsure:
            sure = net.module(pits[: args.unsure])
            loss = loss + 0.01 * sure.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(f"{step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
