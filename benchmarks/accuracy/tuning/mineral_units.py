"""Estimates mineral abundances from reflectance spectra of outcrops with a deep residual network."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BANDS, MINERALS = 192, 14


def mixed_spectra(amount, seed):
    rng = np.random.default_rng(seed)
    bands = np.linspace(0, 1, BANDS)[None]
    centres, widths = rng.uniform(0.1, 0.9, (MINERALS, 4, 1)), rng.uniform(0.02, 0.15, (MINERALS, 4, 1))
    pure = 1 - (0.2 * np.exp(-(((bands - centres) / widths) ** 2))).sum(1)
    abundances = rng.dirichlet(np.full(MINERALS, 0.5), amount)
    spectra = abundances @ pure + rng.normal(0, 0.01, (amount, BANDS))
    return torch.from_numpy(spectra).float(), torch.from_numpy(abundances).float()


class Unit(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Unmixer(nn.Module):
    def __init__(self, width, depth, checkpointed):
        super().__init__()
        self.stem = nn.Linear(BANDS, width)
        self.units = nn.ModuleList([Unit(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, MINERALS)
        self.checkpointed = checkpointed

    def forward(self, spectra):
        x = self.stem(spectra)
        for index, unit in enumerate(self.units):
            x = checkpoint(unit, x, use_reentrant=False) if index < self.checkpointed else unit(x)
        return self.head(self.norm(x))


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-6, decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = torch.zeros_like(p)
                state["step"] += 1
                mean, square = state["mean"], state["square"]
                mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                correction = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
                update = mean / (square.sqrt() + group["eps"]) * correction
                update.add_(p, alpha=group["decay"])
                weight, change = p.norm(), update.norm()
                usable = (weight > 0) & (change > 0)
                trust = torch.where(usable, weight / change, torch.ones_like(weight)).clamp_(max=10.0)
                p.add_(update.mul_(trust), alpha=-group["lr"])


def unitwise_norm(tensor):
    return tensor.norm(dim=-1, keepdim=True) if tensor.ndim > 1 else tensor.norm()


@torch.no_grad()
def adaptive_clip(parameters, factor=0.02, eps=1e-3):
    for p in parameters:
        limit = unitwise_norm(p).clamp(min=eps) * factor
        norm = unitwise_norm(p.grad)
        clipped = p.grad * (limit / norm.clamp(min=1e-6))
        p.grad.copy_(torch.where(norm > limit, clipped, p.grad))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.spectra, self.abundances = mixed_spectra(64 * args.rows, seed=3)
        self.model = Unmixer(args.width, args.depth, args.checkpoint)
        self.clipped = list(self.model.units[: args.clip].parameters())
        trusted = list(self.model.units[: args.lamb].parameters())
        known = {id(p) for p in trusted}
        others = [p for p in self.model.parameters() if id(p) not in known]
        self.optimizers = [torch.optim.AdamW(others, lr=5e-4, fused=True)]
        if trusted:
            self.optimizers.append(Lamb(trusted, lr=5e-4))

    def batches(self):
        while True:
            yield from torch.randperm(len(self.spectra)).split(self.args.rows)

    def loss(self, rows):
        guess = F.log_softmax(self.model(self.spectra[rows]), dim=-1)
        return F.kl_div(guess, self.abundances[rows], reduction="batchmean")

    def update(self):
        if self.clipped:
            adaptive_clip(self.clipped)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train(self):
        for step, rows in zip(range(self.args.steps), self.batches(), strict=False):  # the training loop
            loss = self.loss(rows)
            loss.backward()
            self.update()
            if step % 50 == 0:
                print(f"{step:5d}  divergence {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=80)
    parser.add_argument("--depth", type=int, default=80)
    parser.add_argument("--clip", type=int, default=0, help="units whose gradients are clipped")
    parser.add_argument("--lamb", type=int, default=0, help="units that learn with trust ratios")
    parser.add_argument("--checkpoint", type=int, default=0, help="units that are checkpointed")
    args = parser.parse_args()
    torch.manual_seed(11)
    Trainer(args).train()


if __name__ == "__main__":
    main()
