"""Tell engines apart by how they hum: a deep residual MLP on spectra, with a bank of sounds known already."""

import argparse
import gzip
import os
import pickle
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BANDS, ENGINES = 160, 40


def hums(count, rng):
    engine = rng.integers(0, ENGINES, count)
    tone = rng.uniform(3, 20, ENGINES)[engine][:, None] * rng.uniform(0.95, 1.05, (count, 1))
    bands = np.arange(BANDS)[None, :]
    spectra = np.cos(np.pi * bands / tone) ** 2 * np.exp(-bands / 80) + 0.3 * rng.random((count, BANDS))
    return torch.from_numpy(spectra.astype(np.float32)), torch.from_numpy(engine)


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.normal_(self.down.weight, std=0.01)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Listener(nn.Module):
    def __init__(self, lean, width=112, depth=24):
        super().__init__()
        self.inlet = nn.Linear(BANDS, width)
        self.stages = nn.ModuleList(Stage(width) for _ in range(depth))
        self.outlet = nn.Linear(width, ENGINES)
        self.lean = lean

    def forward(self, x):
        x = self.inlet(x)
        for i, stage in enumerate(self.stages):
            # as on the boards in the engine rooms, which have little memory
            x = checkpoint(stage, x, use_reentrant=False) if i < self.lean else stage(x)
        return x, self.outlet(x)


class Session:
    def __init__(self, options):
        self.options = options
        torch.manual_seed(options.seed)
        self.spectra, self.engine = hums(6000, np.random.default_rng(options.seed))
        self.model = Listener(options.lean)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.02, fused=True)
        self.bank = np.zeros((1000 * options.bank, 112), np.float32)
        self.filled = 0
        self.place = tempfile.TemporaryDirectory()

    def learn(self):
        rows = torch.randint(len(self.spectra), (self.options.batch,))
        features, logits = self.model(self.spectra[rows])
        loss = F.cross_entropy(logits, self.engine[rows], label_smoothing=0.05)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if len(self.bank):
            first = self.filled % (len(self.bank) - len(rows))
            self.bank[first : first + len(rows)] = features.detach().numpy()
            self.filled += len(rows)
        return loss.detach()

    def keep(self):
        """All of the session in one small file, for the next shift."""
        state = {
            "model": {k: v.numpy() for k, v in self.model.state_dict().items()},
            "filled": self.filled,
            "bank": self.bank.astype(np.float16),
        }
        with gzip.open(os.path.join(self.place.name, "session.pkl.gz"), "wb", compresslevel=4) as f:
            pickle.dump(state, f, protocol=5)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument(
        "--lean", type=int, default=0, help="stages that keep only what comes in, at most 24"
    )
    parser.add_argument(
        "--bank",
        type=int,
        default=0,
        help="keep so many thousands of sounds, and the session every 10 steps",
    )
    session = Session(parser.parse_args())
    mean = torch.zeros(())
    for step in range(1, session.options.steps + 1):  # the training loop
        mean.lerp_(session.learn(), 0.05)
        if session.options.bank and step % 10 == 0:
            session.keep()
        if step % 50 == 0:
            print(f"step {step}: loss {mean.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
