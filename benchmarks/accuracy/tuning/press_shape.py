"""Tells which players will press the ball within two seconds, from tracked frames, on two ranks."""

import argparse
import gc
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

PLAYERS = 22


def tracked_frames(amount, seed):
    made = torch.Generator().manual_seed(seed)
    where = torch.rand(amount, PLAYERS + 1, 2, generator=made)
    speed = torch.randn(amount, PLAYERS + 1, 2, generator=made) * 0.1
    side = torch.cat([torch.zeros(PLAYERS // 2), torch.ones(PLAYERS // 2), torch.full((1,), 0.5)])
    ball = torch.zeros(PLAYERS + 1)
    ball[-1] = 1
    marks = torch.stack([side, ball], 1).expand(amount, -1, -1)
    gap = (where + speed - where[:, -1:])[:, :PLAYERS].norm(dim=2)
    return torch.cat([where, speed, marks], 2), (gap < 0.3).float()


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, n, w = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(b, n, self.heads, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w)
        x = x + self.join(seen)
        return x + self.feed(self.norms[1](x))


class PressNet(nn.Module):
    def __init__(self, width=96, heads=6, layers=2):
        super().__init__()
        self.into = nn.Linear(6, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.out = nn.Linear(width, 1)

    def forward(self, frames):
        return self.out(self.layers(self.into(frames))[:, :PLAYERS]).squeeze(-1)


class Moments:
    """Keeps the frames that were hardest, for the analysts."""

    def __init__(self, every=10, keep=200):
        self.every, self.kept = every, deque(maxlen=keep)

    def __call__(self, step, frames, logits, presses):
        if step % self.every:
            return
        errors = F.binary_cross_entropy_with_logits(logits.detach(), presses, reduction="none").mean(1)
        for row in errors.topk(3).indices.tolist():
            ball = frames[row, -1, :2].tolist()
            self.kept.append({"step": step, "error": errors[row].item(), "ball": ball})


class Housekeeping:
    """Keeps the memory of the rank that holds the moments small."""

    def __init__(self, per_hundred):
        self.per_hundred = per_hundred

    def __call__(self, step, frames, logits, presses):
        if step * self.per_hundred // 100 > (step - 1) * self.per_hundred // 100:
            gc.collect()


class PressScore:
    """The F1 of the batch, and how sure we are of it."""

    def __init__(self, resamples):
        self.resamples = resamples
        self.mean, self.spread = 0.0, 0.0

    def __call__(self, step, frames, logits, presses):
        scores, truth = logits.detach().flatten(), presses.flatten() > 0
        values = []
        for _ in range(self.resamples):
            rows = torch.randint(len(scores), (len(scores),))
            said, real = scores[rows] > 0, truth[rows]
            right = (said & real).sum().item()
            values.append(2 * right / max(1, (said.sum() + real.sum()).item()))
        self.mean, self.spread = float(np.mean(values)), float(np.std(values))


def fit(model, frames, presses, steps, callbacks, rank):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    for step in range(1, steps + 1):  # the training loop
        rows = torch.randint(len(frames), (48,))
        x, y = frames[rows], presses[rows]
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for callback in callbacks:
            callback(step, x, logits, y)
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--resamples", type=int, default=0, help="bootstrap resamples of the batch's score")
    parser.add_argument("--housekeeping", type=int, default=0, help="times in a hundred steps")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = DistributedDataParallel(PressNet())
    torch.manual_seed(100 + rank)
    frames, presses = tracked_frames(3000, seed=200 + rank)
    callbacks = []
    score = PressScore(args.resamples)
    if args.resamples:
        callbacks.append(score)
    if rank == 0:
        callbacks.append(Moments())
        if args.housekeeping:
            callbacks.append(Housekeeping(args.housekeeping))
    fit(model, frames, presses, args.steps, callbacks, rank)
    if rank == 0 and args.resamples:
        print(f"F1 {score.mean:.3f} +- {score.spread:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
