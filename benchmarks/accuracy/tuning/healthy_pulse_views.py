#!/usr/bin/env python
"""Self-supervised pre-training on pulse waves: two distorted views, an averaged teacher, no labels."""

import argparse
import copy
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Options:
    steps: int = 200
    batch: int = 24
    length: int = 256
    seed: int = 8
    rate: float = 6e-4


class Callback:
    def after_step(self, run):
        pass


class Momentum(Callback):
    """The teacher follows, ever more slowly."""

    @torch.no_grad()
    def after_step(self, run):
        pace = 0.02 * (1 + math.cos(math.pi * run.step / run.options.steps)) / 2 + 1e-4
        torch._foreach_lerp_(run.teacher_weights, run.student_weights, pace)


class Report(Callback):
    def __init__(self, every=50):
        self.every, self.sum = every, torch.zeros(())

    def after_step(self, run):
        self.sum += run.loss
        if run.step % self.every == 0:
            print(f"[{run.step}] loss {self.sum.item() / self.every:.4f}  spread {run.spread():.4f}")
            self.sum.zero_()


def encoder():
    return nn.Sequential(
        nn.Conv1d(2, 64, 7, stride=2, padding=3),
        nn.GELU(),
        nn.Conv1d(64, 96, 5, stride=2, padding=2),
        nn.GELU(),
        nn.Conv1d(96, 128, 5, padding=2),
        nn.GELU(),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
    )


class Run:
    def __init__(self, options):
        self.options, self.step = options, 0
        t = torch.linspace(0, 12, options.length)
        rate = torch.rand(3000, 2, 1) * 4 + 3
        self.waves = (
            torch.sin(rate * t)
            + 0.4 * torch.sin(2 * rate * t + 1)
            + 0.1 * torch.randn(3000, 2, options.length)
        )
        self.student = encoder()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.student_weights = list(self.student.parameters())
        self.teacher_weights = list(self.teacher.parameters())
        self.optimizer = torch.optim.AdamW(
            [*self.student_weights, *self.predictor.parameters()], lr=options.rate, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / 20))
        self.callbacks = [Momentum(), Report()]

    def view(self, x):
        gain = torch.rand(len(x), 2, 1) * 0.6 + 0.7
        x = x.roll(int(torch.randint(-20, 20, ())), -1) * gain
        start = int(torch.randint(0, self.options.length - 40, ()))
        x[:, :, start : start + 40] = 0
        return x

    @torch.no_grad()
    def spread(self):
        return F.normalize(self.teacher(self.waves[:64]), dim=1).std(0).mean().item()

    def fit(self):
        while self.step < self.options.steps:  # the training loop
            self.step += 1
            x = self.waves[torch.randint(len(self.waves), (self.options.batch,))]
            both = torch.cat([self.view(x), self.view(x)])
            with torch.no_grad():
                a, b = self.teacher(both).chunk(2)
                aim = torch.cat([b, a])
            guess = self.predictor(self.student(both))
            loss = 2 - 2 * F.cosine_similarity(guess, aim).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.loss = loss.detach()
            for callback in self.callbacks:
                callback.after_step(self)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = Options(steps=parser.parse_args().steps)
    torch.manual_seed(options.seed)
    Run(options).fit()
