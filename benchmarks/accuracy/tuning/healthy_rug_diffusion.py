"""Draws rug patterns by diffusion; what is drawn with are averaged weights, and a few rugs are drawn on the way."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

SIDE, LEVELS = 20, 100


def rugs(amount):
    corner = torch.randn(amount, 1, SIDE // 2, SIDE // 2).cumsum(2).cumsum(3)
    half = torch.cat([corner, corner.flip(3)], 3)
    whole = torch.cat([half, half.flip(2)], 2)
    return (whole / whole.std((1, 2, 3), keepdim=True)).clamp_(-2, 2)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.one = nn.Conv2d(width, width, 3, padding=1)
        self.level = nn.Linear(32, width)

    def forward(self, x, level):
        return x + self.one(F.silu(self.norm(x) + self.level(level)[:, :, None, None]))


class Weaver(nn.Module):
    def __init__(self, width=32, blocks=4):
        super().__init__()
        self.register_buffer("waves", torch.exp(torch.linspace(0, -4, 16)))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, level):
        angle = level[:, None].float() * self.waves
        level = torch.cat([angle.sin(), angle.cos()], 1)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, level)
        return self.leave(x)


class Noise:
    def __init__(self):
        at = torch.arange(LEVELS + 1) / LEVELS
        self.kept = (torch.cos(at * math.pi / 2) ** 2).clamp(1e-3, 0.999)

    def onto(self, clean, level):
        kept = self.kept[level].view(-1, 1, 1, 1)
        noise = torch.randn_like(clean)
        return kept.sqrt() * clean + (1 - kept).sqrt() * noise, noise

    @torch.inference_mode()
    def draw(self, weaver, amount, strides=6):
        x = torch.randn(amount, 1, SIDE, SIDE)
        levels = torch.linspace(LEVELS, 0, strides + 1).long().tolist()
        for now, then in zip(levels, levels[1:]):
            guess = weaver(x, torch.full((amount,), now))
            clean = ((x - (1 - self.kept[now]).sqrt() * guess) / self.kept[now].sqrt()).clamp(-2, 2)
            x = self.kept[then].sqrt() * clean + (1 - self.kept[then]).sqrt() * guess
        return x


def train(steps, rows, every):
    torch.manual_seed(4)
    weaver, noise, stock = Weaver(), Noise(), rugs(2000)
    averaged = copy.deepcopy(weaver).requires_grad_(False)
    theirs, ours = list(averaged.parameters()), list(weaver.parameters())
    optimizer = torch.optim.AdamW(ours, lr=1e-3, fused=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    for step in range(1, steps + 1):  # the training loop
        clean = stock[torch.randint(len(stock), (rows,))]
        level = torch.randint(1, LEVELS + 1, (rows,))
        noisy, wanted = noise.onto(clean, level)
        loss = F.mse_loss(weaver(noisy, level), wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        warm.step()
        with torch.no_grad():
            torch._foreach_lerp_(theirs, ours, 0.02)
        if step % every == 0:
            drawn = noise.draw(averaged, 4)
            uneven = (drawn - drawn.flip(3)).abs().mean()
            print(f"step {step}: loss {loss.item():.4f}, left and right differ by {uneven.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--every", type=int, default=100, help="steps between drawings")
    options = parser.parse_args()
    train(options.steps, options.rows, options.every)
