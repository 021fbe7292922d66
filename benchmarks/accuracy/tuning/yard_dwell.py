"""Predicts how many days a container stays in the yard; each rank trains on the books of one terminal."""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

TERMINALS = ("river quay", "seaside hub")
FIELDS = 94
SHIFT = 720


@dataclass(frozen=True)
class Plan:
    steps: int
    hub_surplus: float
    hub_manifest: int
    rows: int = 320
    batches: int = 32
    calls: int = 64


def containers_of(terminal, plan):
    rows = plan.rows * plan.batches
    return round(rows * (1 + plan.hub_surplus)) if TERMINALS[terminal] == "seaside hub" else rows


def manifest(rng, moves):
    minutes = rng.integers(0, SHIFT, moves).tolist()
    kilos = rng.integers(2_200, 30_000, moves).tolist()
    bays = rng.integers(1, 40, moves).tolist()
    return "\n".join(
        f"{minute}+{kilo}+{bay}" for minute, kilo, bay in zip(minutes, kilos, bays, strict=False)
    )


def discharged(text, now):
    done = total = 0.0
    for line in text.splitlines():
        minute, kilos, _ = line.split("+")
        weight = float(kilos)
        total += weight
        if int(minute) <= now:
            done += weight
    return done / total


class TerminalBooks(Dataset):
    def __init__(self, terminal, plan):
        rng = np.random.default_rng(70 + terminal)
        rows = containers_of(terminal, plan)
        self.fields = rng.standard_normal((rows, FIELDS), dtype=np.float32)
        self.days = np.abs(self.fields[:, :6].sum(axis=1)) + np.float32(0.3) * self.fields[:, 6] ** 2
        self.call = rng.integers(0, plan.calls, rows)
        self.progress = np.sort(rng.random((plan.calls, SHIFT), dtype=np.float32), axis=1)
        self.manifests = None
        if TERMINALS[terminal] == "seaside hub" and plan.hub_manifest:
            self.manifests = [manifest(rng, plan.hub_manifest) for _ in range(plan.calls)]

    def __len__(self):
        return len(self.days)

    def __getitem__(self, rows):
        rows = np.asarray(rows)
        call, now = self.call[rows], np.random.randint(0, SHIFT, len(rows))
        if self.manifests is None:
            done = self.progress[call, now]
        else:
            done = [
                discharged(self.manifests[c], minute)
                for c, minute in zip(call.tolist(), now.tolist(), strict=False)
            ]
        clock = np.stack([done, now / SHIFT], axis=1).astype(np.float32)
        return np.concatenate([self.fields[rows], clock], axis=1), self.days[rows]


def loader_of(terminal, plan):
    books = TerminalBooks(terminal, plan)
    size = len(books) // plan.batches
    sampler = BatchSampler(RandomSampler(books), size, drop_last=True)
    return DataLoader(books, batch_size=None, sampler=sampler)


def endless(loader):
    while True:
        yield from loader


def dwell_net(width=512):
    return nn.Sequential(
        nn.Linear(FIELDS + 2, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, 1),
    )


def train(plan):
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = DistributedDataParallel(dwell_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, fused=True)
    feed = endless(loader_of(rank % len(TERMINALS), plan))
    for step in range(plan.steps):  # the training loop
        fields, days = next(feed)
        loss = nn.functional.huber_loss(model(fields).squeeze(1), days)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1} huber {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hub-surplus", type=float, default=0.0, help="traffic beyond the quay's")
    parser.add_argument("--hub-manifest", type=int, default=0, help="moves on a manifest of the hub")
    plan = Plan(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
