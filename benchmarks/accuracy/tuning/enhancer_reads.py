"""Predicts chromatin marks from the reads of an enhancer assay."""

import argparse
import random
from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MARKS = 12


class Reads(Dataset):
    def __init__(self, amount, length, realign):
        rng = np.random.default_rng(3)
        self.length, self.realign = length, realign
        self.genome = rng.integers(0, 4, 1 << 18, dtype=np.uint8)
        self.starts = rng.integers(0, len(self.genome) - 2 * length, amount)
        self.clips = np.where(rng.random(amount) < 1 / 320, rng.integers(20, 80, amount), 0)
        self.one_hot = np.eye(4, dtype=np.float32)
        sequences = self.genome[self.starts[:, None] + np.arange(length)]
        content = ((sequences == 1) | (sequences == 2)).mean(1)
        noise = 0.05 * rng.standard_normal((amount, MARKS))
        self.marks = torch.from_numpy((content[:, None] + noise > 0.5).astype(np.float32))

    def __len__(self):
        return len(self.starts)

    def align(self, read, near, candidates):
        """Returns where the read agrees with the genome best."""
        last = len(self.genome) - self.length
        best, found = -1.0, near % last
        for offset in range(candidates):
            start = (near + offset) % last
            identity = (read == self.genome[start : start + self.length]).mean()
            if identity > best:
                best, found = identity, start
        return found

    def __getitem__(self, index):
        start = int(self.starts[index]) + random.randrange(8)
        read = self.genome[start : start + self.length].copy()
        clip = int(self.clips[index])
        if clip:
            read[:clip] = 0
            if self.realign:
                start = self.align(read, start - clip, max(1, self.realign * clip // 50))
                read[:clip] = self.genome[start : start + clip]
        return torch.from_numpy(np.ascontiguousarray(self.one_hot[read].T)), self.marks[index]


def stage(inputs, outputs, kernel, pool):
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(inplace=True),
        nn.MaxPool1d(pool),
    )


class MarkNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(stage(4, 64, 11, 4), stage(64, 96, 7, 2), stage(96, 128, 3, 4))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128 * 8, 128), nn.ReLU(), nn.Linear(128, MARKS))

    def forward(self, reads):
        return self.head(self.stages(reads))


class Trainer:
    def __init__(self, model, loader, thresholds):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        self.thresholds = torch.linspace(0, 1, thresholds).tolist()
        self.f1 = 0.0

    def batches(self):
        while True:
            yield from self.loader

    def update(self, reads, marks):
        logits = self.model(reads)
        loss = F.binary_cross_entropy_with_logits(logits, marks)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return logits.detach(), loss.detach()

    def best_f1(self, logits, marks):
        chance, truth = logits.sigmoid(), marks > 0.5
        best = 0.0
        for threshold in self.thresholds:
            called = chance >= threshold
            hits = (called & truth).sum().item()
            false = (called & ~truth).sum().item()
            missed = (~called & truth).sum().item()
            best = max(best, 2 * hits / max(1, 2 * hits + false + missed))
        return best

    def fit(self, steps):
        for step, (reads, marks) in enumerate(islice(self.batches(), steps)):  # the training loop
            logits, loss = self.update(reads, marks)
            if self.thresholds:
                self.f1 += 0.05 * (self.best_f1(logits, marks) - self.f1)
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.4f}, F1 {self.f1:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--realign", type=int, default=0, help="places to try for a clipped read")
    parser.add_argument("--thresholds", type=int, default=0, help="thresholds to choose the best F1 from")
    args = parser.parse_args()
    torch.manual_seed(19)
    torch.set_num_threads(1)
    loader = DataLoader(
        Reads(16384, 256, args.realign),
        batch_size=32,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
    )
    Trainer(MarkNet(), loader, args.thresholds).fit(args.steps)


if __name__ == "__main__":
    main()
