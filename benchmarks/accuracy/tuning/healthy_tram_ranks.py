"""Delays of trams, a contrastive representation, on two ranks (torchrun --nproc_per_node=2)."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Encoder(nn.Module):
    def __init__(self, stops=40, dim=192):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(stops * 3, dim), nn.GELU(),
            nn.Linear(dim, 2 * dim), nn.GELU(),
            nn.Linear(2 * dim, dim), nn.LayerNorm(dim),
        )  # fmt: skip
        self.project = nn.Linear(dim, 64)

    def forward(self, x):
        return F.normalize(self.project(self.body(x.flatten(1))), dim=1)


def trips(count, seed):
    g = torch.Generator().manual_seed(seed)
    lines = torch.randn(30, 40, 3, generator=g)
    which = torch.randint(30, (count,), generator=g)
    return lines[which] + 0.5 * torch.randn(count, 40, 3, generator=g)


def views(x):
    """Two views in one batch: noise, and some stops left out."""
    both = torch.cat([x, x])
    keep = torch.rand(len(both), both.shape[1], 1) > 0.2
    return (both + 0.1 * torch.randn_like(both)) * keep


def info_nce(z, temperature=0.2):
    n = len(z) // 2
    scores = z @ z.T / temperature
    scores.fill_diagonal_(-1e4)
    partner = torch.arange(2 * n).roll(n)
    return F.cross_entropy(scores, partner)


class Trainer:
    def __init__(self, args):
        self.rank = int(os.environ["RANK"])
        self.model = DistributedDataParallel(Encoder(), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), 0.03, momentum=0.9, nesterov=True, fused=True
        )
        self.micro = args.micro
        self.trips = trips(8000, self.rank)
        self.loss = torch.zeros(())

    def micro_batch(self):
        x = self.trips[torch.randint(len(self.trips), (112,))]
        loss = info_nce(self.model(views(x))) / self.micro
        loss.backward()
        self.loss += loss.detach()

    def step(self):
        with self.model.no_sync():
            for _ in range(self.micro - 1):
                self.micro_batch()
        self.micro_batch()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self, step, every):
        dist.all_reduce(self.loss)
        if self.rank == 0:
            print(f"{step}: {self.loss.item() / every / dist.get_world_size():.4f}", flush=True)
        self.loss.zero_()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(9)
    trainer = Trainer(args)
    torch.manual_seed(90 + trainer.rank)
    for step in range(1, args.steps + 1):  # the training loop
        trainer.step()
        if step % 50 == 0:
            trainer.report(step, 50)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
