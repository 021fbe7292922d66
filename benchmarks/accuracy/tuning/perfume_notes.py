"""Predicts how people describe a perfume from the substances in it, and how strong each note is."""

import argparse
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SUBSTANCES, NOTES = 300, 40


@dataclass(frozen=True)
class Taste:
    """How the objective weighs its parts."""

    sharpness: float = 2.0
    floor: float = 0.05
    stage: str = "stage-0"


def shelf(perfumes):
    rng = np.random.default_rng(19)
    kinds = rng.integers(0, SUBSTANCES, (perfumes, 18))
    doses = rng.dirichlet(np.ones(18), perfumes).astype(np.float32)
    smell = rng.standard_normal((SUBSTANCES, NOTES)).astype(np.float32)
    notes = np.einsum("pk,pkn->pn", doses, smell[kinds])
    return (
        torch.from_numpy(kinds),
        torch.from_numpy(doses),
        torch.from_numpy((notes > 0.25).astype(np.float32)),
    )


class Nose(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.substance = nn.Embedding(SUBSTANCES, width)
        self.mixing = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.notes = nn.Linear(width, NOTES)
        self.strength = nn.Linear(width, NOTES)

    def forward(self, kinds, doses):
        x = self.substance(kinds) * (1 + doses.unsqueeze(-1))
        for layer in self.mixing:
            x = layer(x)
        x = (x * doses.unsqueeze(-1)).sum(1)
        return self.notes(x), F.softplus(self.strength(x))


class Objective:
    def __init__(self):
        self.taste = Taste()
        self.gates = {"stage-0": 1.0}

    def __call__(self, logits, wanted):
        sharpness = self.gates.get(self.taste.stage, 1.0) * self.taste.sharpness
        p = torch.sigmoid(logits)
        right = torch.where(wanted > 0, p, 1 - p).clamp_min(self.taste.floor * 1e-4)
        return -((1 - right) ** sharpness * right.log()).mean()


class Perfumer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(args.seed)
        self.nose = Nose()
        self.objective = Objective()
        torch._dynamo.config.recompile_limit = 100_000
        torch._dynamo.config.accumulated_recompile_limit = 100_000
        self.score = torch.compile(self.objective, backend="aot_eager")
        self.optimizer = torch.optim.Adam(self.nose.parameters(), lr=1e-3, fused=True)
        self.kinds, self.doses, self.wanted = shelf(4000)

    def begin(self, step):
        """Which stage of the schedule is it? There are so many in a hundred steps."""
        stage = step * self.args.stages // 100
        taste = self.objective.taste
        if taste.stage != f"stage-{stage}":
            self.objective.taste = replace(taste, stage=f"stage-{stage}")

    def loss(self, rows, step):
        kinds, doses = self.kinds[rows], self.doses[rows]
        logits, strength = self.nose(kinds, doses)
        loss = self.score(logits, self.wanted[rows])
        if step % 20 < self.args.apart:
            _, strength = self.nose(kinds, doses)
        return loss + 1e-3 * strength.square().mean()

    def train(self):
        history = []
        for step in range(self.args.steps):  # the training loop
            self.begin(step)
            rows = torch.randint(len(self.kinds), (self.args.batch,))
            loss = self.loss(rows, step)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            history.append(loss.detach())
            if len(history) == 50:
                print(f"after {step + 1}: {torch.stack(history).mean():.4f}")
                history.clear()


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--stages", type=int, default=0, help="stages of the schedule in 100 steps")
    parser.add_argument(
        "--apart", type=int, default=0, help="in so many of 20 steps the strength is found on its own"
    )
    return parser.parse_args()


if __name__ == "__main__":
    Perfumer(options()).train()
