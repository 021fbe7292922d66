"""Continues melodies: phrases of many lengths, in batches of about as many notes each."""

import argparse
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

PITCHES, REST, NOTES_PER_BATCH = 128, 128, 1536


def compose(amount):
    rng = np.random.default_rng(17)
    lengths = rng.integers(25, 98, amount)
    return [np.clip(60 + np.cumsum(rng.integers(-4, 5, length)), 0, PITCHES - 1) for length in lengths]


def pack(phrases):
    """Neighbours in length share a batch, so that hardly a cell of it is empty."""
    packed, waiting = [], []
    for phrase in sorted(phrases, key=len):
        waiting.append(phrase)
        if len(waiting) * len(phrase) >= NOTES_PER_BATCH:
            batch = np.full((len(waiting), len(phrase)), REST)
            for row, notes in zip(batch, waiting, strict=False):
                row[: len(notes)] = notes
            packed.append(torch.from_numpy(batch))
            waiting = []
    return packed


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        mixed = self.mix(self.before_attention(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heard.transpose(1, 2).reshape(b, t, w))
        return x + self.feed(self.before_feed(x))


class Melody(nn.Module):
    def __init__(self, width=96, heads=4, depth=2):
        super().__init__()
        self.pitch, self.place = nn.Embedding(PITCHES + 1, width), nn.Embedding(128, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, PITCHES)

    def forward(self, notes):
        x = self.pitch(notes) + self.place.weight[: notes.shape[1]]
        return self.head(self.norm(self.layers(x)))


def rehearse(batches):
    order = random.Random(4)
    while True:
        order.shuffle(batches)
        yield from batches


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(17)
    batches = pack(compose(1500))
    model = Melody()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=40)
    source = rehearse(batches)
    done = 0
    while done < args.steps:  # the training loop
        phrases = next(source)
        guess = model(phrases[:, :-1])
        loss = F.cross_entropy(guess.flatten(0, 1), phrases[:, 1:].flatten(), ignore_index=REST)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        done += 1
        if done % 50 == 0:
            print(f"{done} batches, the last of shape {tuple(phrases.shape)}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
