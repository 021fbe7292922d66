"""Names the animals in camera-trap frames, with two workers that crop and flip."""

import argparse
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SPECIES = ("none", "roe deer", "red deer", "boar", "fox", "badger", "hare", "lynx", "wolf", "marten")


class Frames(Dataset):
    def __init__(self, amount, side=36, crop=32):
        rng = np.random.default_rng(30)
        self.species = rng.integers(0, len(SPECIES), amount)
        self.frames = rng.integers(0, 200, (amount, 3, side, side), dtype=np.uint8)
        self.frames[:, 1] += (5 * self.species[:, None, None]).astype(np.uint8)
        self.crop, self.slack = crop, side - crop

    def __len__(self):
        return len(self.species)

    def __getitem__(self, index):
        top, left = random.randint(0, self.slack), random.randint(0, self.slack)
        frame = self.frames[index, :, top : top + self.crop, left : left + self.crop]
        if random.random() < 0.5:
            frame = frame[:, :, ::-1]
        return torch.from_numpy(np.ascontiguousarray(frame)), int(self.species[index])


def convolution(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def build_model():
    return nn.Sequential(
        convolution(3, 32, stride=2),
        convolution(32, 48),
        convolution(48, 96, stride=2),
        convolution(96, 96),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, len(SPECIES)),
    )


def endless(loader):
    while True:
        for frames, species in loader:
            yield frames.float().div_(127.5).sub_(1), species


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(30)
    loader = DataLoader(
        Frames(6000),
        batch_size=24,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=4,
    )
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(args.steps, 1))
    feed = endless(loader)
    for step in range(1, args.steps + 1):  # the training loop
        frames, species = next(feed)
        logits = model(frames)
        loss = F.cross_entropy(logits, species, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            right = (logits.argmax(1) == species).float().mean().item()
            print(f"{step}: loss {loss.item():.3f}, right {right:.2f}")


if __name__ == "__main__":
    main()
