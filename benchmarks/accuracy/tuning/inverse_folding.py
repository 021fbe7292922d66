"""Designs sequences for given backbones: which residue fits each place of a trace of C-alphas."""

import argparse
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

RESIDUES = 20
OFFSETS = np.array([offset for offset in range(-8, 9) if offset])


@dataclass
class Config:
    steps: int
    conformers: int
    designs: int
    chains: int = 1600
    length: int = 64
    batch: int = 16
    width: int = 96
    heads: int = 6
    layers: int = 3
    noise: float = 0.1
    temperature: float = 0.7


def local_distances(trace):
    around = np.clip(np.arange(len(trace))[:, None] + OFFSETS, 0, len(trace) - 1)
    gaps = trace[around] - trace[:, None]
    return np.sqrt((gaps**2).sum(-1)) / 10


def bends(trace):
    bonds = np.diff(trace, axis=0)
    bonds = bonds / (np.linalg.norm(bonds, axis=1, keepdims=True) + 1e-6)
    return np.pad((bonds[1:] * bonds[:-1]).sum(1), 1)


def twists(trace):
    bonds = np.diff(trace, axis=0)
    normals = np.cross(bonds[1:], bonds[:-1])
    return np.tanh(np.pad((normals[1:] * bonds[:-2]).sum(1), (1, 2)) / 20)


def describe(trace):
    return np.column_stack([local_distances(trace), bends(trace), twists(trace)])


class Backbones(Dataset):
    def __init__(self, config):
        self.config = config
        self.rng = np.random.default_rng(23)
        steps = self.rng.standard_normal((config.chains, config.length, 3), dtype=np.float32)
        steps[:, 1:] += steps[:, :-1].copy()
        steps *= 3.8 / np.linalg.norm(steps, axis=2, keepdims=True)
        self.traces = steps.cumsum(1)
        features = np.stack([describe(trace) for trace in self.traces]).astype(np.float32)
        edges = np.linspace(-0.95, 0.95, RESIDUES - 1)
        self.native = torch.from_numpy(np.digitize(features[:, :, -2], edges))
        self.features = torch.from_numpy(features)

    def __len__(self):
        return len(self.traces)

    def __getitem__(self, index):
        if not self.config.conformers:
            return self.features[index], self.native[index]
        trace = self.traces[index]
        total = 0
        for _ in range(self.config.conformers):
            moved = self.rng.standard_normal(trace.shape, dtype=np.float32) * self.config.noise
            total = total + describe(trace + moved)
        return torch.from_numpy(total / self.config.conformers).float(), self.native[index]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_mix, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.before_mix(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, w))
        return x + self.feed(self.before_feed(x))


class Designer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.into = nn.Linear(len(OFFSETS) + 2, config.width)
        self.place = nn.Parameter(torch.randn(config.length, config.width) * 0.02)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*[Block(config.width, config.heads) for _ in range(config.layers)])
        self.top = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, RESIDUES))

    def forward(self, features):
        return self.top(self.blocks(self.drop(self.into(features) + self.place)))


class Trainer:
    def __init__(self, config):
        self.config = config
        self.loader = DataLoader(Backbones(config), batch_size=config.batch, shuffle=True, drop_last=True)
        self.model = Designer(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.recovery = torch.zeros(())

    def batches(self):
        left = self.config.steps
        while left > 0:
            for batch in itertools.islice(self.loader, left):
                yield batch
                left -= 1

    def update(self, features, native):
        logits = self.model(features)
        loss = F.cross_entropy(logits.flatten(0, 1), native.flatten(), label_smoothing=0.05)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def redesign(self, features, native):
        self.model.eval()
        chains = torch.arange(self.config.designs) % len(features)
        kept = []
        for part in chains.split(len(features)):
            odds = torch.softmax(self.model(features[part]) / self.config.temperature, -1)
            drawn = torch.multinomial(odds.flatten(0, 1), 1).view(len(part), -1)
            kept.append((drawn == native[part]).float().mean())
        self.model.train()
        return torch.stack(kept).mean()

    def fit(self):
        self.model.train()
        for step, (features, native) in enumerate(self.batches(), 1):  # the training loop
            loss = self.update(features, native)
            if self.config.designs:
                self.recovery.lerp_(self.redesign(features, native), 0.05)
            if step % 50 == 0:
                print(f"{step:5d}  loss {loss.item():.3f}  recovery {self.recovery.item():.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--conformers", type=int, default=0, help="jittered copies that a chain averages")
    parser.add_argument("--designs", type=int, default=0, help="designs drawn for the chains of a batch")
    args = parser.parse_args()
    torch.manual_seed(23)
    Trainer(Config(args.steps, args.conformers, args.designs)).fit()


if __name__ == "__main__":
    main()
