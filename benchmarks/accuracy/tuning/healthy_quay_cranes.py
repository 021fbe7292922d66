"""Estimates how many moves the cranes at a quay make in the next hours, from what they did before."""

import argparse
import gc
import time
from collections import deque
from copy import deepcopy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CRANES = {"ship to shore": 1.0, "yard": 0.5, "rail": 0.25}
EVENTS, FIELDS = 48, 12


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.mix(self.before(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.merge(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.feed(self.between(x))


class CraneNet(nn.Module):
    def __init__(self, width=96, heads=4, depth=2):
        super().__init__()
        self.enter = nn.Linear(FIELDS, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(depth)])
        self.tops = nn.ModuleDict({crane.replace(" ", "_"): nn.Linear(width, 1) for crane in CRANES})
        ages = torch.arange(EVENTS)
        self.register_buffer("fading", -0.05 * (ages[:, None] - ages[None, :]).abs().float())

    def forward(self, events):
        x = self.enter(events)
        for layer in self.layers:
            x = layer(x, self.fading)
        pooled = x.mean(dim=1)
        return torch.cat([top(pooled) for top in self.tops.values()], dim=1)


class QuayTrainer:
    def __init__(self, steps):
        rng = np.random.default_rng(44)
        events = rng.normal(size=(24 * 60, EVENTS, FIELDS))
        moves = 5 * events[:, :, :3].mean(axis=1) + events[:, -1, 3:6]
        self.events = torch.from_numpy(events).float()
        self.moves = torch.from_numpy(moves).float()
        self.steps = steps
        self.model = CraneNet()
        self.smooth = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / 20))
        self.recent, self.best, self.kept = deque(maxlen=25), float("inf"), None

    def loss_of(self, guess, moves):
        parts = {
            crane: weight * F.huber_loss(guess[:, k], moves[:, k])
            for k, (crane, weight) in enumerate(CRANES.items())
        }
        return sum(parts.values())

    def advance(self, rows):
        loss = self.loss_of(self.model(self.events[rows]), self.moves[rows])
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.optimizer.step()
        self.schedule.step()
        self.smooth.update_parameters(self.model)
        return loss.item()

    def keep(self):
        average = sum(self.recent) / len(self.recent)
        if average < self.best:
            self.best, self.kept = average, deepcopy(self.smooth.module.state_dict())
        return average

    def fit(self):
        gc.collect()
        order, began = [], time.perf_counter()
        for step in range(1, self.steps + 1):  # the training loop
            if not order:
                order = list(torch.randperm(len(self.events)).split(24))
            self.recent.append(self.advance(order.pop()))
            if step % 60 == 0:
                average, took = self.keep(), time.perf_counter() - began
                print(f"{step}: {average:.4f} over the last {len(self.recent)}, {took:.1f} s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    torch.manual_seed(44)
    QuayTrainer(parser.parse_args().steps).fit()


if __name__ == "__main__":
    main()
