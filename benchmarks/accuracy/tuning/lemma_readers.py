"""How hard is a sentence to read? A small encoder learns the graders' scores."""

import argparse
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WORDS, ROOM = 2000, 64


def corpus(count, seed):
    dice = np.random.default_rng(seed)
    lengths = np.clip(dice.normal(44, 8, count).round(), 20, ROOM).astype(np.int64)
    words = np.minimum(dice.zipf(1.3, (count, ROOM)), WORDS - 1)
    words[np.arange(ROOM) >= lengths[:, None]] = 0
    rarity = np.log1p(words)
    scores = rarity.sum(1) / lengths + 0.02 * (lengths - 44) + 0.2 * dice.standard_normal(count)
    scores = (scores - scores.mean()) / scores.std()
    return torch.from_numpy(words), lengths, torch.from_numpy(scores.astype(np.float32))


def batches(words, lengths, scores, size, multiple, seed):
    """Endless; sentences of like length come together."""
    dice = np.random.default_rng(seed)
    while True:
        order = dice.permutation(len(lengths))
        order = order[np.argsort(lengths[order], kind="stable")]
        order = order[: len(order) // size * size].reshape(-1, size)
        for rows in dice.permutation(order):
            width = -(-int(lengths[rows].max()) // multiple) * multiple
            rows = torch.from_numpy(rows)
            text = words[rows, : min(width, ROOM)]
            yield F.pad(text, (0, width - text.shape[1])), scores[rows]


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, mask):
        n, t, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.wide(self.between(x))


class Reader(nn.Module):
    def __init__(self, dim=96, heads=4, layers=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, dim)
        self.places = nn.Embedding(512, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.score = nn.Linear(dim, 1)

    def forward(self, text):
        there = text > 0
        x = self.words(text) + self.places.weight[: text.shape[1]]
        mask = there[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        weight = there.unsqueeze(2).float()
        return self.score((x * weight).sum(1) / weight.sum(1)).squeeze(1)


class Agreement:
    """Rank correlation of model and graders, and how sure we may be of it."""

    def __init__(self, draws, seed=5):
        self.draws, self.dice = draws, np.random.default_rng(seed)
        self.low, self.high = deque(maxlen=100), deque(maxlen=100)

    def update(self, guess, truth):
        found = []
        for _ in range(self.draws):
            rows = self.dice.integers(0, len(guess), len(guess))
            a, b = guess[rows].argsort().argsort(), truth[rows].argsort().argsort()
            found.append(np.corrcoef(a, b)[0, 1])
        low, high = np.quantile(found, (0.05, 0.95))
        self.low.append(low)
        self.high.append(high)

    def __str__(self):
        return f"agreement {np.mean(self.low):.3f} to {np.mean(self.high):.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sentences", type=int, default=32, help="sentences in a batch")
    parser.add_argument("--multiple", type=int, default=1, help="make widths a multiple of this")
    parser.add_argument("--slices", type=int, default=0, help="pass a batch in so many slices")
    parser.add_argument("--agreement", type=int, default=0, help="follow it, with so many resamplings")
    args = parser.parse_args()

    torch.manual_seed(3)
    words, lengths, scores = corpus(8192, 3)
    source = batches(words, lengths, scores, args.sentences, max(args.multiple, 1), 4)
    reader = Reader()
    optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-3, fused=True)
    agreement = Agreement(args.agreement) if args.agreement else None

    for step, (text, truth) in zip(range(1, args.steps + 1), source):  # the training loop
        optimizer.zero_grad()
        if args.slices:
            guesses = []
            for t, s in zip(text.chunk(args.slices), truth.chunk(args.slices)):
                guess = reader(t)
                loss = F.mse_loss(guess, s, reduction="sum") / len(truth)
                loss.backward()
                guesses.append(guess.detach())
            guess = torch.cat(guesses)
        else:
            guess = reader(text)
            loss = F.mse_loss(guess, truth)
            loss.backward()
        optimizer.step()
        if agreement:
            agreement.update(guess.detach().numpy(), truth.numpy())
        if step % 50 == 0:
            print(f"{step}: loss {loss.item():.4f}", agreement or "")


if __name__ == "__main__":
    main()
