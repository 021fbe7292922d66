"""Distil a wide network that grades essays into a narrow one, with accumulated gradients."""

import argparse
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Callbacks:
    """What happens beside the training."""

    every: int
    history: list = field(default_factory=list)

    def after_step(self, step, student, essays, grades):
        if step % self.every:
            return
        with torch.no_grad():
            hits = (student(essays).argmax(1) == grades).float().mean().item()
        self.history.append(hits)
        print(f"step {step}: {hits:.1%} of the held-out essays", flush=True)


class Reader(nn.Module):
    """Word vectors, a convolution over them in the form of a product, and a pooled answer."""

    def __init__(self, width, words=1000, grades=6):
        super().__init__()
        self.embed = nn.Embedding(words, 48)
        self.triple = nn.Linear(3 * 48, width)
        self.again = nn.Linear(width, width)
        self.grade = nn.Linear(width, grades)

    def forward(self, essays):
        x = self.embed(essays).unfold(1, 3, 2).flatten(2)
        x = F.gelu(self.again(F.gelu(self.triple(x))))
        return self.grade(x.amax(1))


def kd_loss(ours, theirs, grades, warmth):
    soft = F.kl_div(F.log_softmax(ours / warmth, 1), F.softmax(theirs / warmth, 1), reduction="batchmean")
    return 0.7 * warmth**2 * soft + 0.3 * F.cross_entropy(ours, grades)


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=200)
    cli.add_argument("--accumulate", type=int, default=2)
    cli.add_argument("--batch", type=int, default=24)
    cli = cli.parse_args()
    torch.manual_seed(1)
    essays = torch.randint(0, 1000, (8000, 81))
    grades = ((essays < 120).sum(1) - 5).clamp(0, 5)
    teacher = Reader(320).eval().requires_grad_(False)
    student = Reader(160)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 150)
    callbacks = Callbacks(every=100)
    held_out = essays[-256:], grades[-256:]
    for step in range(1, cli.steps + 1):  # the training loop
        warmth = max(1.0, 4.0 - step / 100)
        for _ in range(cli.accumulate):
            rows = torch.randint(0, len(essays) - 256, (cli.batch,))
            text, mark = essays[rows], grades[rows]
            with torch.inference_mode():
                theirs = teacher(text)
            loss = kd_loss(student(text), theirs.clone(), mark, warmth) / cli.accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        callbacks.after_step(step, student, *held_out)
