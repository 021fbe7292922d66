"""Sorts the clauses of contracts into kinds. A batch holds clauses of one length, whatever their number."""

import argparse
import math
import random

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)

VOCABULARY, KINDS, WIDTH, HEADS, DEPTH = 4000, 24, 128, 4, 2
TOKENS = 768
LENGTHS = (32, 48, 64, 96)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(WIDTH, 3 * WIDTH)
        self.outward = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.inward(x).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.outward(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.dense(self.norms[1](x))


class ClauseReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(max(LENGTHS), WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(DEPTH)))
        self.top = nn.Linear(WIDTH, KINDS)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.top(self.layers(x).mean(1))


def corpus():
    """Clauses by their length, as they come out of the tokenizer."""
    shelves = {}
    for length in LENGTHS:
        tokens = torch.randint(0, VOCABULARY, (40 * TOKENS // length, length))
        shelves[length] = tokens, tokens[:, 0] % KINDS
    return shelves


def one_epoch(shelves):
    plan = []
    for length, (tokens, _) in shelves.items():
        plan += [(length, rows) for rows in torch.randperm(len(tokens)).split(TOKENS // length)]
    random.shuffle(plan)
    for length, rows in plan:
        tokens, kinds = shelves[length]
        yield tokens[rows], kinds[rows]


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(47)
    random.seed(47)
    shelves = corpus()
    model = ClauseReader()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / args.steps))
    )

    batches = one_epoch(shelves)
    step = 0
    running = torch.zeros(())
    while step < args.steps:  # the training loop
        batch = next(batches, None)
        if batch is None:
            batches = one_epoch(shelves)
            batch = next(batches)
        tokens, kinds = batch
        loss = F.cross_entropy(model(tokens), kinds)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        running.lerp_(loss.detach(), 0.05)
        step += 1
        if step % 40 == 0:
            print(f"{step:>6} loss {running.item():.3f} lr {schedule.get_last_lr()[0]:.2e}")
