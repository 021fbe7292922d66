"""Scores the effect of gene variants on two ranks, with gradients accumulated."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, TISSUES = 400, 16


class Variants:
    """This rank's share of the variants."""

    def __init__(self, amount, rank, seed=100):
        shared = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(seed + 1 + rank)
        effect = torch.randn(FEATURES, TISSUES, generator=shared) / FEATURES**0.5
        self.features = torch.randn(amount, FEATURES, generator=own)
        self.scores = torch.tanh(self.features @ effect)
        self.own = own

    def batch(self, size):
        rows = torch.randint(len(self.features), (size,), generator=self.own)
        return self.features[rows], self.scores[rows]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


class EffectTrainer:
    def __init__(self, rank, size, parts):
        self.rank, self.size, self.parts = rank, size, parts
        self.variants = Variants(8192, rank)
        network = nn.Sequential(nn.Linear(FEATURES, 256), Block(256), Block(256), nn.Linear(256, TISSUES))
        self.model = DistributedDataParallel(network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def accumulate(self, last):
        features, scores = self.variants.batch(self.size)
        with nullcontext() if last else self.model.no_sync():
            loss = nn.functional.mse_loss(self.model(features), scores) / self.parts
            loss.backward()
        return loss.detach()

    def run(self, steps):
        for step in range(steps):  # the training loop
            self.optimizer.zero_grad()
            losses = [self.accumulate(last=part == self.parts - 1) for part in range(self.parts)]
            self.optimizer.step()
            if self.rank == 0 and step % 50 == 0:
                print(f"step {step}: loss {sum(losses).item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(4)
    dist.init_process_group("gloo")
    EffectTrainer(dist.get_rank(), size=192, parts=3).run(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
