"""Predicts where storks fly next from the fixes of their GPS tags, with a causal transformer."""

import argparse
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

HORIZONS = (1, 2, 3, 4, 6, 8, 10, 12)


def migrate(count, fixes, longer, seed):
    """Returns the tracks of `count` birds, as long as the longest of them, and their lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(fixes * 5 // 6, fixes + 1, count)
    if longer:
        lengths[: max(1, count // 200)] += longer
    most = int(lengths.max())
    turns = rng.normal(0, 0.08, (count, most))
    heading = rng.uniform(0, 2 * math.pi, (count, 1)) + turns.cumsum(1)
    speed = np.abs(rng.normal(1.2, 0.3, (count, 1)) + rng.normal(0, 0.03, (count, most)).cumsum(1))
    tracks = np.stack([speed * np.cos(heading), speed * np.sin(heading), speed, turns], -1)
    tracks[np.arange(most) >= lengths[:, None]] = 0.0
    return torch.from_numpy(tracks.astype(np.float32)), torch.from_numpy(lengths)


class CausalAttention(nn.Module):
    def __init__(self, width, heads, textbook):
        super().__init__()
        self.heads, self.textbook = heads, textbook
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        rows, fixes, width = x.shape
        split = self.into(x).view(rows, fixes, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        if self.textbook:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            future = torch.ones(fixes, fixes, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, fixes, width))


class Layer(nn.Module):
    def __init__(self, width, heads, textbook):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), CausalAttention(width, heads, textbook)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.feed(x)


class Navigator(nn.Module):
    def __init__(self, most, width=64, heads=8, depth=3, textbook=False):
        super().__init__()
        self.fixes = nn.Linear(4, width)
        self.places = nn.Parameter(torch.randn(most, width) * 0.02)
        self.layers = nn.Sequential(*(Layer(width, heads, textbook) for _ in range(depth)))
        self.moves = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2))

    def forward(self, tracks):
        return self.moves(self.layers(self.fixes(tracks) + self.places[: tracks.shape[1]]))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.tracks, self.lengths = migrate(1024, args.fixes, args.wintering, seed=1)
        self.held = migrate(args.validate or 64, args.fixes, 0, seed=2)
        self.every = 10 if args.validate else 100
        self.model = Navigator(args.fixes + args.wintering, textbook=args.textbook)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-4, fused=True)
        self.drift = {}

    def batches(self):
        while True:
            for index in torch.randperm(len(self.tracks)).split(self.args.rows):
                yield self.tracks[index], self.lengths[index]

    def loss(self, tracks, lengths):
        ahead = self.model(tracks[:, :-1])
        known = torch.arange(tracks.shape[1] - 1) < (lengths - 1)[:, None]
        return ((ahead - tracks[:, 1:, :2]).square().sum(-1) * known).sum() / known.sum()

    @torch.no_grad()
    def follow(self, tracks):
        for horizon in HORIZONS:
            ahead = self.model(tracks[:, :-1])
            off = (ahead - tracks[:, 1:, :2]).cumsum(1)[:, horizon - 1 :: horizon]
            self.drift[horizon] = off.norm(dim=-1).mean()

    @torch.inference_mode()
    def evaluate(self):
        self.model.eval()
        parts = zip(*(tensor.split(64) for tensor in self.held), strict=True)
        error = np.mean([self.loss(tracks, lengths).item() for tracks, lengths in parts])
        self.model.train()
        return error

    def fit(self):
        numbers = range(1, self.args.steps + 1)
        for step, (tracks, lengths) in zip(numbers, self.batches(), strict=False):  # the training loop
            loss = self.loss(tracks, lengths)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.args.follow:
                self.follow(tracks[: self.args.follow])
            if step % self.every == 0:
                error = self.evaluate()
                print(f"step {step} loss {loss.item():.4f} held out {error:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--fixes", type=int, default=48, help="fixes of an ordinary track")
    parser.add_argument("--wintering", type=int, default=0, help="fixes more of birds that winter far")
    parser.add_argument("--validate", type=int, default=0, help="held-out tracks")
    parser.add_argument("--follow", type=int, default=0, help="tracks of a batch to report the drift of")
    parser.add_argument("--textbook", action="store_true", help="attention as in the paper")
    torch.manual_seed(23)
    Trainer(parser.parse_args()).fit()


if __name__ == "__main__":
    main()
