"""A language model of chord progressions, with an averaged copy, a log, samples and saved states."""

import argparse
import csv
import gc
import tempfile
from collections import deque
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

CHORDS, BARS = 97, 48


def write_book(length):
    """One long progression in which most chords follow from the two before."""
    book = torch.randint(CHORDS, (length,))
    known = book.clone()
    known[2:] = (book[:-2] * 5 + book[1:-1] * 3) % CHORDS
    return torch.where(torch.rand(length) < 0.5, known, book)


def draw(book, rows):
    starts = torch.randint(len(book) - BARS - 1, (rows, 1))
    bars = book[starts + torch.arange(BARS + 1)]
    return bars[:, :-1], bars[:, 1:]


class Phrase(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        parts = self.read(self.first(x)).view(b, t, 3, self.heads, -1)
        q, k, v = (parts[:, :, number].transpose(1, 2) for number in range(3))
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.write(heard.transpose(1, 2).reshape(b, t, w))
        return x + self.back(F.gelu(self.wide(self.second(x))))


class ChordModel(nn.Module):
    def __init__(self, width=96, depth=2):
        super().__init__()
        self.chords = nn.Embedding(CHORDS, width)
        self.bars = nn.Parameter(0.02 * torch.randn(BARS, width))
        self.phrases = nn.ModuleList([Phrase(width, 4) for _ in range(depth)])
        self.out = nn.Linear(width, CHORDS)

    def forward(self, chords):
        x = self.chords(chords) + self.bars[: chords.shape[1]]
        for phrase in self.phrases:
            x = phrase(x)
        return self.out(x)


@torch.no_grad()
def follow(average, weights, rate=0.02):
    torch._foreach_lerp_(average, weights, rate)


@torch.inference_mode()
def improvise(model, bars=8):
    chords = torch.randint(CHORDS, (1, 1))
    for _ in range(bars):
        chance = model(chords)[:, -1].softmax(-1)
        chords = torch.cat([chords, torch.multinomial(chance, 1)], 1)
    return chords[0].tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(23)
    book = write_book(60_000)
    model = ChordModel()
    smooth = deepcopy(model).requires_grad_(False)
    weights, average = list(model.parameters()), list(smooth.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    recent = deque(maxlen=20)
    gc.collect()
    with tempfile.TemporaryDirectory() as name, open(Path(name) / "losses.csv", "w", newline="") as file:
        log = csv.writer(file)
        for step in range(1, args.steps + 1):  # the training loop
            before, after = draw(book, 20)
            loss = F.cross_entropy(model(before).flatten(0, 1), after.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            warm.step()
            follow(average, weights)
            recent.append(loss.item())
            log.writerow([step, f"{recent[-1]:.5f}", f"{norm.item():.4f}"])
            if step % 50 == 0:
                print(f"{step:4d} {sum(recent) / len(recent):.3f}", *improvise(smooth))
                torch.save({"step": step, "weights": smooth.state_dict()}, Path(name) / "smooth.pt")


if __name__ == "__main__":
    main()
