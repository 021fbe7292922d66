"""Trains a small CNN to tell drawn shapes apart; the training thread loads."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

SIZE = 32
BATCH = 32
SAVE_EVERY = 10


class Shapes(Dataset):
    def __init__(self, count, crops, remote_ms):
        self.images = torch.rand(count, 1, SIZE, SIZE)
        self.labels = torch.randint(10, (count,))
        self.crops = crops
        self.remote_ms = remote_ms

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.remote_ms:
            time.sleep(self.remote_ms / 1000)  # stands for a read from a store far away
        for _ in range(self.crops):
            image = image.roll(1, dims=2)
        return image, self.labels[index]


def pad_boxes(samples, boxes):
    for _ in samples:
        corners = []
        for box in range(boxes):
            corners.append([box % SIZE, box // SIZE, (box + 5) % SIZE, (box + 7) // SIZE])
            corners.sort()
    return default_collate(samples)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * (SIZE // 4) ** 2, 10),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=151)
    parser.add_argument("--crops", type=int, default=0, help="random shifts per image")
    parser.add_argument("--remote-ms", type=float, default=0, help="time that the store needs for an image")
    parser.add_argument("--boxes", type=int, default=0, help="boxes per image, sorted in collate")
    parser.add_argument("--log-lines", type=int, default=0, help="lines written and synced each step")
    parser.add_argument("--history-mb", type=int, default=0, help="activations kept in each checkpoint")
    args = parser.parse_args()
    torch.manual_seed(0)

    data = Shapes(args.steps * BATCH, args.crops, args.remote_ms)
    loader = DataLoader(
        data, BATCH, shuffle=True, collate_fn=lambda samples: pad_boxes(samples, args.boxes)
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    history = torch.zeros(args.history_mb, 1 << 18)
    log = open("train.log", "w")  # noqa: SIM115 (ordinary scripts do)
    for step, (images, labels) in enumerate(loader):  # the training loop
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        for line in range(args.log_lines):
            log.write(f"step {step} layer {line} loss {loss.item():.4f}\n")
            log.flush()
            os.fsync(log.fileno())
        if args.history_mb and step % SAVE_EVERY == SAVE_EVERY - 1:
            torch.save({"model": model.state_dict(), "history": history}, "last.pt")
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
