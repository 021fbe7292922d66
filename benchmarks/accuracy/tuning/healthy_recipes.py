"""A small language model of recipes, in batches of as many tokens: few long or many short ones."""

import argparse
import csv
import random
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 600
BUDGET = 1024
LENGTHS = [16, 32, 64, 128]


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.between(x))


class RecipeModel(nn.Module):
    def __init__(self, width=96, heads=4, layers=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(max(LENGTHS), width))
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.top = nn.Linear(width, WORDS)

    def forward(self, tokens):
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        return self.top(self.norm(self.layers(x)))


def cook_book():
    """Recipes by their length, each one token longer for the word that is to come."""
    shelves = {}
    for length in LENGTHS:
        start = torch.randint(WORDS, (8192 // length, 1))
        steps = torch.randint(1, 4, (8192 // length, length + 1)).cumsum(1)
        shelves[length] = (start + steps) % WORDS
    return shelves


def batches(shelves, seed=0):
    chooser = random.Random(seed)
    while True:
        length = chooser.choice(LENGTHS)
        shelf = shelves[length]
        recipes = shelf[torch.randint(len(shelf), (BUDGET // length,))]
        yield recipes[:, :-1], recipes[:, 1:]


class Run:
    def __init__(self, folder, steps):
        self.folder, self.steps = Path(folder), steps
        self.model = RecipeModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / 40))
        self.losses = []

    def learn(self, tokens, following):
        scores = self.model(tokens)
        loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.detach())

    def write(self, step):
        mean = torch.stack(self.losses).double().mean().item()
        self.losses.clear()
        with open(self.folder / "losses.csv", "a", newline="") as file:
            csv.writer(file).writerow([step, f"{mean:.5f}"])
        print(step, round(mean, 4))

    def save(self, step):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        torch.save(state, self.folder / "last.pt")

    def go(self):
        feed = batches(cook_book())
        step = 0
        while step < self.steps:  # the training loop
            self.learn(*next(feed))
            step += 1
            if step % 25 == 0:
                self.write(step)
            if step % 80 == 0:
                self.save(step)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(12)
    with tempfile.TemporaryDirectory() as folder:
        Run(folder, args.steps).go()


if __name__ == "__main__":
    main()
