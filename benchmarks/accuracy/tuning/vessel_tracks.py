"""What kind of vessel sails so: a small transformer over AIS tracks."""

import argparse
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

KINDS, LENGTH, FEATURES = 8, 48, 6
REPORTS = 16384


def despiked(course, rounds):
    """Replaces positions that jump by smooth ones, again and again, for receivers with a bad clock."""
    keep = np.arange(course.shape[-1] // 2 + 1) < 900
    for _ in range(rounds):
        smooth = np.fft.irfft(np.fft.rfft(course) * keep, n=course.shape[-1])
        off = np.abs(course - smooth)
        course = np.where(off > 3 * off.std(), smooth, course)
    return course


class Tracks(Dataset):
    def __init__(self, vessels=3072, messages=0, despike=0, seed=19):
        rng = np.random.default_rng(seed)
        self.kinds = rng.integers(KINDS, size=vessels)
        turn = 0.05 * (1 + self.kinds)[:, None] * rng.standard_normal((vessels, LENGTH))
        heading = turn.cumsum(1) + rng.uniform(0, 2 * np.pi, (vessels, 1))
        speed = 0.1 + 0.02 * self.kinds[:, None] + 0.02 * rng.standard_normal((vessels, LENGTH))
        east, north = (speed * np.cos(heading)).cumsum(1), (speed * np.sin(heading)).cumsum(1)
        parts = [east, north, np.cos(heading), np.sin(heading), speed, turn]
        self.tracks = torch.from_numpy(np.stack(parts, -1)).float()
        self.despike, self.messages = despike, messages
        self.course = rng.standard_normal((2, REPORTS)).cumsum(1) / 50
        self.picks = np.linspace(0, REPORTS - 1, LENGTH).astype(int)
        self.log = np.zeros((0, 4), np.float32)
        if messages:
            self.log = rng.random((messages + 4096, 4), dtype=np.float32)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, vessel):
        track = self.tracks[vessel]
        if self.despike and vessel % 96 == 17:
            course = despiked(self.course, self.despike)
            track = track.clone()
            track[:, :2] += torch.from_numpy(course[:, self.picks].T).float()
        start = vessel % 4096
        raw = self.log[start : start + self.messages] if self.messages else None
        return track, int(self.kinds[vessel]), raw


def bundle(samples):
    tracks, kinds, raw = zip(*samples, strict=False)
    return torch.stack(tracks), torch.tensor(kinds), [part for part in raw if part is not None]


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        mixed = self.project(self.before(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Sailor(nn.Module):
    def __init__(self, width=96, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Linear(FEATURES + 1, width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.top = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, KINDS))

    def forward(self, tracks, distance):
        x = self.embed(torch.cat([tracks, distance], -1)) + self.place
        return self.top(self.layers(x).mean(1))


class Ports:
    """Where vessels tend to be; the distance to the next such place is a feature."""

    def __init__(self, positions, amount=24):
        self.positions = positions
        self.centres = positions[torch.randperm(len(positions))[:amount]].clone()

    def distance(self, tracks):
        return torch.cdist(tracks[..., :2].flatten(0, 1), self.centres).amin(1).view(*tracks.shape[:2], 1)

    def settle(self, rounds):
        for _ in range(rounds):
            nearest = torch.cdist(self.positions, self.centres).argmin(1)
            sums = torch.zeros_like(self.centres).index_add_(0, nearest, self.positions)
            counts = torch.bincount(nearest, minlength=len(self.centres)).clamp_min(1)
            self.centres = 0.5 * self.centres + 0.5 * sums / counts[:, None]


class Callback:
    def on_step(self, step, loss, raw):
        pass


class Report(Callback):
    def __init__(self, every):
        self.every = every

    def on_step(self, step, loss, raw):
        if step % self.every == 0:
            longest = max(map(len, raw), default=0)
            print(f"step {step}  loss {loss.item():.3f}  longest log {longest}")


class SettlePorts(Callback):
    """Lets the ports settle now and then, at moments that know nothing of the sampler."""

    def __init__(self, ports, rounds, chance=0.1):
        self.ports, self.rounds, self.chance = ports, rounds, chance
        self.dice = random.Random(5)

    def on_step(self, step, loss, raw):
        if self.dice.random() < self.chance:
            self.ports.settle(self.rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--messages", type=int, default=0, help="raw messages to hand on for the plots")
    parser.add_argument("--despike", type=int, default=0, help="rounds for receivers with a bad clock")
    parser.add_argument("--settle", type=int, default=0, help="rounds of clustering for the ports")
    args = parser.parse_args()
    torch.manual_seed(8)

    data = Tracks(messages=args.messages, despike=args.despike)
    sampler = RandomSampler(data, replacement=True, num_samples=args.steps * args.batch)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.workers, collate_fn=bundle)
    ports = Ports(data.tracks[:, ::16, :2].flatten(0, 1)[:3000])
    sailor = Sailor()
    optimizer = torch.optim.AdamW(sailor.parameters(), lr=5e-4, weight_decay=0.02, fused=True)
    callbacks = [Report(50)]
    if args.settle:
        callbacks.append(SettlePorts(ports, args.settle))

    for step, (tracks, kinds, raw) in enumerate(loader, 1):  # the training loop
        loss = F.cross_entropy(sailor(tracks, ports.distance(tracks)), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for callback in callbacks:
            callback.on_step(step, loss, raw)


if __name__ == "__main__":
    main()
