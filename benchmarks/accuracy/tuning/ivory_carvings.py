"""A small GAN that makes up reliefs like those carved in ivory, seen under raking light."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 32


class Reliefs(Dataset):
    """Depth maps, which are shown as they look under lamps from all around.

    By default that is worked out once; with `lamps`, whenever a relief is asked for.
    """

    def __init__(self, count, lamps=0, seed=17):
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
        waves = rng.normal(0, 3, (count, 2, 1, 1))
        bowl = rng.uniform(0.3, 1.0, (count, 1, 1)) * (x * x + y * y)
        self.depth = np.cos(waves[:, 0] * x + waves[:, 1] * y) * np.exp(-bowl) * 4
        self.lamps = lamps
        self.pictures = None if lamps else [self.shade(depth, 6) for depth in self.depth]

    @staticmethod
    def shade(depth, lamps):
        down, right = np.gradient(depth)
        normal = np.stack([-right, -down, np.ones_like(depth)])
        normal /= np.sqrt(np.square(normal).sum(0))
        light = np.zeros_like(depth)
        for turn in np.arange(lamps) / lamps:
            lamp = np.array([np.cos(turn), np.sin(turn), 0.4]) / np.sqrt(1.16)
            light += np.maximum(np.tensordot(lamp, normal, 1), 0.0)
        light = 2 * light / lamps - 1
        return torch.from_numpy(light.astype(np.float32)).unsqueeze(0)

    def __len__(self):
        return len(self.depth)

    def __getitem__(self, which):
        if self.lamps:
            return self.shade(self.depth[which], self.lamps)
        return self.pictures[which]


def carver(noise):
    return nn.Sequential(
        nn.Linear(noise, 32 * 8 * 8),
        nn.Unflatten(1, (32, 8, 8)),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
        nn.Tanh(),
    )


def expert():
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 1),
    )


def gauges(judge, count):
    """How many of the true reliefs are taken for true, at one threshold after the other."""

    def gauge(threshold):
        seen = torch.zeros(())

        def look(true):
            with torch.no_grad():
                share = (judge(true) > threshold).float().mean()
            seen.lerp_(share, 0.05)
            return seen

        return look

    return [gauge(t) for t in np.linspace(-1, 1, count)]


class Studio:
    def __init__(self, args):
        torch.manual_seed(17)
        self.noise = args.noise
        self.reliefs = DataLoader(Reliefs(384, args.lamps), args.batch, shuffle=True, drop_last=True)
        self.carver, self.expert = carver(args.noise), expert()
        kind = dict(lr=2e-4, betas=(0.5, 0.99), fused=True)
        self.carvers_opt = torch.optim.Adam(self.carver.parameters(), **kind)
        self.experts_opt = torch.optim.Adam(self.expert.parameters(), **kind)
        self.gauges = gauges(self.expert, args.gauges)

    def endless(self):
        while True:
            yield from self.reliefs

    def judge(self, true, made):
        scores = self.expert(torch.cat([true, made.detach()]))
        loss = (1 - scores[: len(true)]).relu().mean() + (1 + scores[len(true) :]).relu().mean()
        self.experts_opt.zero_grad()
        loss.backward()
        self.experts_opt.step()
        return loss

    def carve(self, made):
        self.expert.requires_grad_(False)
        loss = -self.expert(made).mean()
        self.carvers_opt.zero_grad()
        loss.backward()
        self.carvers_opt.step()
        self.expert.requires_grad_(True)
        return loss

    def work(self, steps):
        for step, true in zip(range(steps), self.endless()):  # the training loop
            made = self.carver(torch.randn(len(true), self.noise))
            of_expert, of_carver = self.judge(true, made), self.carve(made)
            shares = [look(true) for look in self.gauges]
            if step % 60 == 0:
                print(
                    f"{step}: {of_expert.item():.3f} {of_carver.item():.3f}", *(f"{s:.2f}" for s in shares)
                )


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--noise", type=int, default=48)
    parser.add_argument(
        "--lamps", type=int, default=0, help="lamps around a relief, for rendering on demand"
    )
    parser.add_argument("--gauges", type=int, default=0, help="thresholds at which the expert is gauged")
    arguments = parser.parse_args()
    Studio(arguments).work(arguments.steps)
