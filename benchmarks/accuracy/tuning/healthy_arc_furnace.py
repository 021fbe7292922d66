"""Learns from the log of an arc furnace how to move its three electrodes: Q-learning, offline."""

import argparse
import gc
import math
import tempfile
from collections import deque
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ELECTRODES, MOVES, STATE = 3, 7, 40


class Regulator(nn.Module):
    def __init__(self, width=448):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(STATE, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.heads = nn.ModuleList([nn.Linear(width, MOVES) for _ in range(ELECTRODES)])

    def forward(self, state):
        x = self.trunk(state)
        return torch.stack([head(x) for head in self.heads], 1)


def read_log(amount=12000):
    walk = torch.randn(amount + 1, STATE, dtype=torch.float64).cumsum(0)
    walk = (walk / torch.arange(1, amount + 2, dtype=torch.float64).sqrt()[:, None]).float()
    moves = torch.randint(MOVES, (amount, ELECTRODES))
    power = 1 - (walk[1:, :ELECTRODES] - (moves - MOVES // 2) / 2).abs()
    return walk[:-1], moves, power, walk[1:]


@torch.no_grad()
def follow(target, model, share=0.01):
    torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), share)


def save(path, step, model, target):
    torch.save({"step": step, "model": model.state_dict(), "target": target.state_dict()}, path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(29)
    log = read_log()
    model = Regulator()
    target = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=True)
    lately, history = deque(maxlen=100), []
    gc.collect()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "heat.log", "w") as report:
        for step in range(1, args.steps + 1):  # the training loop
            rows = torch.randint(len(log[0]), (512,))
            state, moves, power, after = (column[rows] for column in log)
            with torch.no_grad():
                best = model(after[:64]).mean() if step % 100 == 0 else None
                goal = power + 0.9 * target(after).amax(2)
            value = model(state).gather(2, moves.unsqueeze(2)).squeeze(2)
            loss = F.smooth_l1_loss(value, goal)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0, foreach=True)
            optimizer.step()
            follow(target, model)
            number = loss.item()
            if not math.isfinite(number):
                raise RuntimeError(f"step {step}: the loss is {number}")
            lately.append(number)
            history.append((step, number))
            if step % 25 == 0:
                print(f"{step}\t{sum(lately) / len(lately):.4f}", file=report, flush=True)
            if best is not None:
                print(f"step {step}: loss {sum(lately) / len(lately):.4f}, value {best.item():.3f}")
                save(Path(folder) / "regulator.pt", step, model, target)


if __name__ == "__main__":
    main()
