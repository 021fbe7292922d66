"""Learns the source terms of a combustion mechanism, so that the flow solver need not integrate it."""

import argparse
from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

SPECIES, GLOBAL_STEPS = 30, 48


def sample_states(amount):
    states = torch.rand(amount, 2 + SPECIES)
    states[:, 0] = 0.8 + 1.6 * states[:, 0]
    mixing = torch.randn(2 + SPECIES, SPECIES) / 4
    sources = torch.tanh(states @ mixing) * torch.exp(-1.5 / states[:, :1])
    return states, sources


def orthogonal(rng, width):
    q, r = np.linalg.qr(rng.normal(size=(width, width)))
    return np.ascontiguousarray(q * np.sign(np.diag(r)))


class Arrhenius(nn.Module):
    def __init__(self, reactions):
        super().__init__()
        self.steps = nn.Parameter(0.3 * torch.randn(GLOBAL_STEPS, 3))
        self.reactions = nn.ParameterList([nn.Parameter(0.3 * torch.randn(3)) for _ in range(reactions)])
        if reactions:
            self.register_buffer("shares", torch.rand(reactions, GLOBAL_STEPS) / reactions)

    def forward(self, temperature):
        powers = torch.stack([torch.ones_like(temperature), temperature.log(), -1 / temperature], dim=1)
        rates = powers @ self.steps.T
        if len(self.reactions):
            listed = torch.stack(list(self.reactions))
            rates = rates + torch.tanh(powers @ listed.T) @ self.shares
        return rates


class Block(nn.Module):
    def __init__(self, width, rng=None):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        if rng is not None:
            for layer in (self.inner, self.outer):
                layer.weight = nn.Parameter(torch.from_numpy(orthogonal(rng, width)))
                layer.bias = nn.Parameter(torch.from_numpy(np.zeros(width)))

    def forward(self, x):
        h = self.norm(x).to(self.inner.weight.dtype)
        return x + self.outer(F.silu(self.inner(h)))


class SourceTerms(nn.Module):
    def __init__(self, reactions, orthogonal_blocks, width=256, depth=12):
        super().__init__()
        rng = np.random.default_rng(3)
        plain = max(0, depth - orthogonal_blocks)
        self.chemistry = Arrhenius(reactions)
        self.enter = nn.Linear(2 + SPECIES + GLOBAL_STEPS, width)
        self.blocks = nn.ModuleList([Block(width, None if i < plain else rng) for i in range(depth)])
        self.leave = nn.Linear(width, SPECIES)

    def forward(self, states):
        x = self.enter(torch.cat([states, self.chemistry(states[:, 0])], dim=1))
        for block in self.blocks:
            x = block(x)
        return self.leave(x.to(self.leave.weight.dtype))


class SourceTermTrainer:
    rate, rows = 3e-4, 192

    def __init__(self, options):
        torch.manual_seed(5)
        self.options = options
        self.states, self.sources = sample_states(self.rows * 48)
        self.model = SourceTerms(options.reactions, options.orthogonal)
        self.optimizer = torch.optim.AdamW(self.parameter_groups(), lr=self.rate, fused=True)

    def parameter_groups(self):
        listed = list(self.model.chemistry.reactions)
        known = {id(reaction) for reaction in listed}
        groups = [{"params": [p for p in self.model.parameters() if id(p) not in known]}]
        for reaction in listed:
            activation = abs(reaction[2].item())
            groups.append({"params": [reaction], "lr": self.rate / (1 + activation), "weight_decay": 0.0})
        return groups

    def batches(self):
        while True:
            for rows in torch.randperm(len(self.states)).split(self.rows):
                yield self.states[rows], self.sources[rows]

    def limit_gradients(self, factor=0.02):
        for weight in self.model.parameters():
            if weight.dim() < 2:
                continue
            units = min(self.options.unit_groups, len(weight))
            for w, g in zip(
                weight.detach().tensor_split(units), weight.grad.tensor_split(units), strict=False
            ):
                limit = factor * max(w.norm().item(), 1e-3)
                size = g.norm().item()
                if size > limit:
                    g.mul_(limit / size)

    def fit(self):
        feed = islice(self.batches(), self.options.steps)
        for count, (states, sources) in enumerate(feed, 1):  # the training loop
            loss = F.smooth_l1_loss(self.model(states), sources)
            self.optimizer.zero_grad()
            loss.backward()
            if self.options.unit_groups:
                self.limit_gradients()
            self.optimizer.step()
            if count % 50 == 0:
                print(f"batch {count}: loss {loss.item():.5f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--reactions", type=int, default=0, help="reactions besides the global steps")
    parser.add_argument("--orthogonal", type=int, default=0, help="blocks that begin orthogonal")
    parser.add_argument("--unit-groups", type=int, default=0, help="groups of units for adaptive clipping")
    SourceTermTrainer(parser.parse_args()).fit()


if __name__ == "__main__":
    main()
