"""Predicts readmission for two clinics that share gradients but no patients: one rank trains in each."""

import argparse
import gc
import random
from contextlib import nullcontext
from datetime import datetime, timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

NORTH, SOUTH = 0, 1
STAYS, COLUMNS, HOURS, SIGNS = 1024, 40, 32, 16
LABS = ("creatinine", "lactate", "sodium", "potassium", "crp", "urea", "glucose", "albumin")
ADMISSION, TIME = datetime(2023, 1, 1), "%Y-%m-%d %H:%M"
BANDWIDTHS = (2.0, 4.0, 8.0, 16.0, 32.0)


def export_reports(amount, lines, draw):
    """What a laboratory's system exports: a line for each value."""
    reports = []
    for _ in range(amount):
        rows = []
        for number in range(lines):
            taken = (ADMISSION + timedelta(minutes=7 * number)).strftime(TIME)
            rows.append(f"{taken};{LABS[number % len(LABS)]};{draw.gauss(0, 1):.3f}")
        reports.append("\n".join(rows))
    return reports


def read_report(text):
    """Means of the laboratory's values, where the early ones count for more."""
    sums, weights = dict.fromkeys(LABS, 0.0), dict.fromkeys(LABS, 1e-3)
    for line in text.splitlines():
        taken, lab, value = line.split(";")
        hours = (datetime.strptime(taken, TIME) - ADMISSION).total_seconds() / 3600
        weight = 1 / (1 + hours)
        sums[lab] += weight * float(value)
        weights[lab] += weight
    return [sums[lab] / weights[lab] for lab in LABS]


class Clinic(Dataset):
    """The stays of one clinic; indexed by a list of them."""

    def __init__(self, rank, lab_lines):
        draw = torch.Generator().manual_seed(100 + rank)
        self.table = torch.randn(STAYS, COLUMNS, generator=draw)
        self.signs = torch.randn(STAYS, HOURS, SIGNS, generator=draw).cumsum(1) * 0.2
        risk = self.table[:, :4].sum(1) + self.signs[:, -6:, :3].mean((1, 2))
        self.readmitted = (risk > 0.5).float()
        self.reports = export_reports(STAYS // 8, lab_lines, random.Random(rank)) if lab_lines else []

    def __len__(self):
        return STAYS

    def __getitem__(self, stays):
        table = self.table[stays]
        if self.reports:
            labs = [read_report(self.reports[stay % len(self.reports)]) for stay in stays]
            table[:, -len(LABS) :] = torch.tensor(labs)
        return table, self.signs[stays], self.readmitted[stays]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.mix(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.feed(self.after(x))


class StayNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.signs = nn.Linear(SIGNS, 64)
        self.position = nn.Parameter(torch.randn(HOURS, 64) * 0.02)
        self.blocks = nn.Sequential(Block(64, 4), Block(64, 4))
        self.table = nn.Linear(COLUMNS, width)
        self.deep = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.join = nn.Linear(64 + width, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, table, signs):
        course = self.blocks(self.signs(signs) + self.position).mean(1)
        static = F.gelu(self.table(table))
        for layer in self.deep:
            static = static + F.gelu(layer(static))
        stay = F.gelu(self.join(torch.cat([course, static], 1)))
        return self.head(stay).squeeze(1), stay


class Trainer:
    def __init__(self, options):
        self.options, self.rank = options, dist.get_rank()
        self.clinic = Clinic(self.rank, options.lab_lines if self.rank == SOUTH else 0)
        rows = options.rows + (options.north_rows if self.rank == NORTH else 0)
        sampler = BatchSampler(RandomSampler(self.clinic), min(rows, STAYS), drop_last=True)
        self.loader = DataLoader(self.clinic, batch_size=None, sampler=sampler)
        self.model = DistributedDataParallel(StayNet(options.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, fused=True)
        self.reference = torch.randn(options.reference, 64) if self.rank == SOUTH else torch.empty(0, 64)
        self.reference_norms = self.reference.square().sum(1)
        self.drift = [None] * options.watched
        self.seen = 0

    def batches(self):
        while True:
            yield from self.loader

    def alignment(self, stay):
        """How near the stays are to those that the other clinic has published, by Gaussian kernels."""
        squared = stay.square().sum(1, keepdim=True) + self.reference_norms - 2 * stay @ self.reference.T
        return sum(torch.exp(squared / (-2 * width**2)).mean() for width in BANDWIDTHS) / len(BANDWIDTHS)

    def loss(self, table, signs, readmitted):
        logits, stay = self.model(table, signs)
        loss = F.binary_cross_entropy_with_logits(logits, readmitted)
        if len(self.reference):
            loss = loss - 0.1 * self.alignment(stay)
        return loss

    def watch(self, table):
        """Follows the means of columns over both clinics, lest they drift."""
        for number in range(self.options.watched):
            mean = table[:, number % COLUMNS].mean()
            dist.all_reduce(mean)
            self.drift[number] = mean / dist.get_world_size()

    def tidy(self):
        self.seen += 1
        share = self.options.collect
        if self.rank == NORTH and self.seen * share // 100 > (self.seen - 1) * share // 100:
            gc.collect()

    def update(self, batches):
        self.optimizer.zero_grad()
        total, parts = torch.zeros(()), self.options.accumulate
        for part in range(1, parts + 1):
            table, signs, readmitted = next(batches)
            alone = part < parts and not self.options.every_part
            with self.model.no_sync() if alone else nullcontext():
                loss = self.loss(table, signs, readmitted) / parts
                loss.backward()
            total += loss.detach()
            self.watch(table)
            self.tidy()
        self.optimizer.step()
        return total

    def train(self):
        batches = self.batches()
        for step in range(1, self.options.steps + 1):  # the training loop
            loss = self.update(batches)
            if step % 50 == 0 and self.rank == NORTH:
                print(f"step {step} loss {loss.item():.4f}", flush=True)

    @torch.inference_mode()
    def brier(self):
        table, signs, readmitted = self.clinic[list(range(256))]
        return (self.model.module(table, signs)[0].sigmoid() - readmitted).square().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="stays in each part of a batch")
    parser.add_argument("--accumulate", type=int, default=4, help="parts of a batch")
    parser.add_argument("--width", type=int, default=256, help="of the layers for the table")
    parser.add_argument("--every-part", action="store_true", help="average the gradients of each part")
    parser.add_argument("--north-rows", type=int, default=0, help="more stays for the northern clinic")
    parser.add_argument("--lab-lines", type=int, default=0, help="lines of the southern clinic's reports")
    parser.add_argument("--collect", type=int, default=0, help="percent of the parts that free memory")
    parser.add_argument("--watched", type=int, default=0, help="means to be followed over both clinics")
    parser.add_argument("--reference", type=int, default=0, help="stays that the south aligns with")
    options = parser.parse_args()
    torch.manual_seed(17)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(options)
    trainer.train()
    print(f"clinic {trainer.rank}: Brier score {trainer.brier():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
