# Find the bed under the ice in airborne radar frames.
import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

DEPTH, WIDTH = 96, 96


class Frames(Dataset):
    """Frames as recorded; gain and noise are put on at random when they are read.

    One frame in `every` is a deep sounding, which has to be migrated first.
    """

    def __init__(self, count, passes, every=110):
        rng = np.random.default_rng(7)
        bed = rng.uniform(25, 80, (count, 1)) + np.cumsum(rng.normal(0, 0.5, (count, WIDTH)), 1)
        self.bed = np.clip(bed, 4, DEPTH - 4).astype(np.float32)
        grid = np.arange(DEPTH, dtype=np.float32)[:, None]
        echo = [np.exp(-0.5 * ((grid - line[None]) / 1.5) ** 2) for line in self.bed]
        self.frames = (np.stack(echo) * 6000).astype(np.int16)
        self.deep = rng.random(count) < 1 / every
        self.deep[5] = True
        self.passes = passes
        self.gain = np.exp(np.linspace(0, 1, DEPTH, dtype=np.float32))[:, None]

    def __len__(self):
        return len(self.frames)

    def migrate(self, frame):
        """Collapse the hyperbolas, a pass for each velocity that may be the right one."""
        best, sharpest = frame, -1.0
        columns = np.arange(WIDTH)
        for velocity in np.linspace(0.9, 1.1, self.passes):
            moved = np.zeros_like(frame)
            for offset in range(-8, 9):
                rows = np.sqrt(np.arange(DEPTH) ** 2 + (offset * velocity) ** 2)
                rows = np.minimum(rows.astype(np.int64), DEPTH - 1)
                moved += frame[rows][:, np.clip(columns + offset, 0, WIDTH - 1)] / 17
            sharpness = float((moved**2).mean())
            if sharpness > sharpest:
                best, sharpest = moved, sharpness
        return best

    def __getitem__(self, i):
        frame = self.frames[i].astype(np.float32) / 6000
        if self.passes and self.deep[i]:
            frame = self.migrate(frame)
        rng = np.random.default_rng(int(torch.randint(2**31, ())))
        frame *= self.gain * rng.uniform(0.7, 1.3)
        frame += 0.2 * rng.standard_normal(frame.shape, dtype=np.float32)
        return torch.from_numpy(frame)[None], torch.from_numpy(self.bed[i] / DEPTH)


class Passes(Sampler):
    """Random frames: `length` of them, or no end."""

    def __init__(self, count, length=None):
        self.count = count
        self.length = length

    def __iter__(self):
        drawn = 0
        while True:
            for i in torch.randperm(self.count).tolist():
                yield i
                drawn += 1
                if drawn == self.length:
                    return


def stage(inside, outside, stride):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride=(stride, 1), padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


def build_model():
    return nn.Sequential(
        stage(1, 12, 2),
        stage(12, 24, 2),
        stage(24, 24, 2),
        stage(24, 32, 2),
        nn.Conv2d(32, 1, (DEPTH // 16, 5), padding=(0, 2)),
        nn.Flatten(),
        nn.Sigmoid(),
    )


def forever(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--deep", type=int, default=0, help="velocities to migrate deep soundings with")
    parser.add_argument("--seasons", type=int, default=0, help="field seasons in 100 steps, one an epoch")
    args = parser.parse_args()

    torch.manual_seed(21)
    # a large block, freed at once: malloc then keeps what the steps free, and does not give it back
    torch.empty(30 << 20, dtype=torch.uint8)
    batch = 12
    data = Frames(2000, args.deep)
    season = max(1, 100 // args.seasons) * batch if args.seasons else None
    loader = DataLoader(data, batch, sampler=Passes(len(data), season), num_workers=2)

    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    criterion = nn.SmoothL1Loss(beta=0.05)
    frames = forever(loader)

    for step in range(args.steps):  # the training loop
        image, bed = next(frames)
        loss = criterion(model(image), bed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 25 == 0:
            print(f"{step + 1}/{args.steps} loss {loss.item():.5f} lr {schedule.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    main()
