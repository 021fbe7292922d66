"""Response of cell lines to drugs, from the lines' mutated genes and the drugs' fingerprints.

The genes come as vectors of a language model for proteins, made once and not trained here.
"""

import argparse

import numpy as np
import torch
from torch import nn

GENES, PER_LINE, VECTOR, BITS = 4000, 24, 64, 512


class Screen:
    """Cell lines by drugs, all in memory."""

    def __init__(self, pairs=8192, exact_levels=False):
        rng = np.random.default_rng(31)
        self.genes = torch.from_numpy(rng.integers(GENES, size=(pairs, PER_LINE)))
        levels = torch.from_numpy(rng.gamma(2.0, 0.5, (pairs, PER_LINE)))
        self.levels = levels if exact_levels else levels.float()
        self.prints = torch.from_numpy(rng.random((pairs, BITS)) < 0.1).float()
        signal = self.prints[:, :32].sum(1) + levels.float().mean(1)
        self.response = (signal - signal.mean()) / signal.std()

    def draw(self, rows):
        part = torch.randint(len(self.response), (rows,))
        return self.genes[part], self.levels[part], self.prints[part], self.response[part]


class Harmonics(nn.Module):
    """A smooth function of the expression level."""

    def __init__(self, amount):
        super().__init__()
        self.register_buffer("speeds", torch.linspace(0.1, 8, amount, dtype=torch.float64))
        self.mix = nn.Linear(2 * amount, VECTOR, dtype=torch.float64)

    def forward(self, levels):
        angles = levels.unsqueeze(-1) * self.speeds
        return self.mix(torch.cat([angles.sin(), angles.cos()], -1)).float()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Response(nn.Module):
    def __init__(self, variants, harmonics, width=384):
        super().__init__()
        table = torch.randn(max(variants, GENES), VECTOR)
        self.vectors = nn.Embedding.from_pretrained(table, freeze=not variants)
        self.harmonics = Harmonics(harmonics) if harmonics else None
        self.gene = nn.Sequential(nn.Linear(VECTOR, 192), nn.GELU(), nn.Linear(192, 128), nn.GELU())
        self.drug = nn.Linear(BITS, width - 128)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(4)))
        self.top = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, genes, levels, prints):
        line = self.vectors(genes) * levels.float().unsqueeze(-1)
        if self.harmonics is not None:
            line = line + self.harmonics(levels)
        both = torch.cat([self.gene(line).mean(1), self.drug(prints)], 1)
        return self.top(self.blocks(both)).squeeze(1)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.screen = Screen(exact_levels=args.harmonics > 0)
        self.model = Response(args.variants, args.harmonics)
        named = self.model.named_parameters()
        self.trained = [p for name, p in named if not name.startswith("vectors.")]
        self.matrices = [p for p in self.trained if p.ndim == 2 and p.dtype == torch.float32]
        self.optimizer = torch.optim.AdamW(self.trained, lr=3e-4, weight_decay=0.01, fused=True)
        self.criterion = nn.HuberLoss()

    @torch.no_grad()
    def clip_units(self, amount, ratio=0.02):
        """Keeps the gradient of a unit small beside the unit's weights."""
        for weight in self.matrices:
            for unit, slope in zip(weight[:amount], weight.grad[:amount], strict=False):
                most = ratio * max(unit.norm().item(), 1e-3)
                size = slope.norm().item()
                if size > most:
                    slope.mul_(most / size)
            amount -= min(amount, len(weight))
            if not amount:
                break

    def step(self):
        genes, levels, prints, response = self.screen.draw(self.args.rows)
        loss = self.criterion(self.model(genes, levels, prints), response)
        self.optimizer.zero_grad()
        loss.backward()
        if self.args.clip_units:
            self.clip_units(self.args.clip_units)
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        return loss.detach()

    def fit(self):
        for number in range(1, self.args.steps + 1):  # the training loop
            loss = self.step()
            if number % 50 == 0:
                print(f"[{number}/{self.args.steps}] {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--harmonics", type=int, default=0, help="of the expression levels")
    parser.add_argument("--find-nan", action="store_true", help="say where a NaN came from")
    parser.add_argument("--variants", type=int, default=0, help="vectors for gene variants, too")
    parser.add_argument("--clip-units", type=int, default=0, help="units with adaptive clipping")
    args = parser.parse_args()
    torch.manual_seed(4)
    torch.autograd.set_detect_anomaly(args.find_nan)
    Trainer(args).fit()


if __name__ == "__main__":
    main()
