"""Fits a network to recorded signals that worker processes read and prepare."""

import argparse
import gc
import os
import time

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, default_collate

LENGTH = 512
BATCH = 16


class Recordings(Dataset):
    """Every 400th recording is damaged and takes long to repair."""

    def __init__(self, count, read_ms, bad_ms, fields):
        self.count, self.read_s, self.bad_s, self.fields = count, read_ms / 1000, bad_ms / 1000, fields
        self.time = torch.linspace(0, 1, LENGTH)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.read_s)
        if index % 400 == 200:
            time.sleep(self.bad_s)
        sample = {"signal": torch.sin(index * self.time), "label": torch.tensor(index % 7)}
        sample.update({f"channel{number}": self.time[:4] for number in range(self.fields)})
        return sample


class Collate:
    def __init__(self, sorts, kept):
        self.sorts = sorts
        self.keeps, self.kept = kept, []

    def __call__(self, samples):
        batch = default_collate(samples)
        for _ in range(self.sorts):
            sorted(range(400), key=lambda number: -number)
        if self.keeps and not self.kept:
            gc.freeze()  # what the worker was forked with
            self.kept = [[number] for number in range(self.keeps)]
        if self.kept:
            gc.collect()
        return batch


def build_model():
    return nn.Sequential(
        nn.Unflatten(1, (1, LENGTH)),
        nn.Conv1d(1, 32, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.Conv1d(32, 64, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.Conv1d(64, 64, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(256, 7),
    )


def train(args):
    per_epoch = args.epoch_steps or args.steps
    recordings = Recordings(per_epoch * BATCH, args.read_ms, args.bad_ms, args.fields)
    loader = DataLoader(
        recordings,
        BATCH,
        num_workers=args.workers,
        collate_fn=Collate(args.sorts, args.kept),
        persistent_workers=not args.fresh_workers,
    )
    model, criterion = build_model(), nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.02)
    log = open("steps.csv", "w")  # noqa: SIM115 (ordinary scripts do)
    for epoch in range(args.steps // per_epoch):
        for batch in loader:  # the training loop
            loss = criterion(model(batch["signal"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for line in range(args.log_lines):
                print(epoch, line, loss.item(), file=log, flush=True)
                os.fsync(log.fileno())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--epoch-steps", type=int, default=0, help="steps of an epoch; 0 has one epoch")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--fresh-workers", action="store_true")
    parser.add_argument("--read-ms", type=float, default=0, help="time that the disk needs for a recording")
    parser.add_argument("--bad-ms", type=float, default=0, help="time to repair a damaged recording")
    parser.add_argument("--fields", type=int, default=0, help="further tensors per recording")
    parser.add_argument("--sorts", type=int, default=0, help="lists sorted per batch")
    parser.add_argument(
        "--kept", type=int, default=0, help="objects that a worker keeps, and collects among"
    )
    parser.add_argument("--log-lines", type=int, default=0)
    torch.manual_seed(0)
    train(parser.parse_args())
