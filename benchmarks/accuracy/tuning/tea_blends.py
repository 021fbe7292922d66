"""Which tea will a taster like next? Two towers, trained with the other teas of the batch as negatives."""

import argparse
import os
import random
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument(
    "--tries", type=int, default=0, help="choose each further tea as the best known of so many"
)
parser.add_argument(
    "--bank", type=int, default=0, help="keep the vectors of so many teas, and save them too"
)
args = parser.parse_args()

TASTERS, TEAS, BATCH, DIM = 4000, 6000, 512, 64
SAVE_EVERY = 5

# who has drunk what: the best 30 of 120 that came by
rng = np.random.default_rng(5)
taste = rng.standard_normal((TASTERS, 8), dtype=np.float32)
aroma = rng.standard_normal((TEAS, 8), dtype=np.float32)
offered = rng.integers(TEAS, size=(TASTERS, 120))
liking = np.einsum("td,tkd->tk", taste, aroma[offered])
drunk = np.take_along_axis(offered, np.argsort(-liking, axis=1)[:, :30], axis=1)
drunk = rng.permuted(drunk, axis=1)
known = [set(row) for row in drunk.tolist()]
fame = np.bincount(drunk.ravel(), minlength=TEAS).tolist()
drunk = torch.from_numpy(drunk)

torch.manual_seed(5)
dice = random.Random(5)


def tower():
    return nn.Sequential(nn.Linear(DIM, 512), nn.ReLU(), nn.Linear(512, 256))


model = nn.ModuleDict(
    {
        "past": nn.EmbeddingBag(TEAS, DIM, mode="mean"),
        "leaf": nn.Embedding(TEAS, DIM),
        "taster": tower(),
        "tea": tower(),
    }
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
answers = torch.arange(BATCH)
bank = torch.randn(args.bank, 256) if args.bank else None


def well_known_but_new(rows):
    """for each taster a tea that others drink a lot, and they never did"""
    out = []
    for row in rows.tolist():
        seen, best, most = known[row], 0, -1
        for _ in range(args.tries):
            tea = dice.randrange(TEAS)
            if tea not in seen and fame[tea] > most:
                best, most = tea, fame[tea]
        out.append(best)
    return torch.tensor(out)


with tempfile.TemporaryDirectory(prefix="tea_") as shelf:
    for step in range(args.steps):  # the training loop
        rows = torch.randint(TASTERS, (BATCH,))
        history = drunk[rows, :20]
        liked = drunk[rows, torch.randint(20, 30, (BATCH,))]
        further = well_known_but_new(rows) if args.tries else torch.randint(TEAS, (BATCH,))

        wishes = F.normalize(model["taster"](model["past"](history)), dim=1)
        teas = F.normalize(model["tea"](model["leaf"](torch.cat([liked, further]))), dim=1)
        loss = F.cross_entropy(wishes @ teas.T / 0.1, answers)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if bank is not None:
            place = step * BATCH % len(bank)
            shelf_space = bank[place : place + BATCH]
            shelf_space.copy_(teas[: len(shelf_space)].detach())
            if step % SAVE_EVERY == SAVE_EVERY - 1:
                fresh, final = os.path.join(shelf, "fresh.pt"), os.path.join(shelf, "teas.pt")
                torch.save({"step": step, "model": model.state_dict(), "bank": bank}, fresh)
                os.replace(fresh, final)
        if step % 50 == 49:
            print("step", step + 1, "loss", round(loss.item(), 4))
