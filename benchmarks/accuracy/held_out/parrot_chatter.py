"""What will the parrot say next?  A small transformer over the syllables that it has picked up."""

import argparse
import random
import threading
import time

import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

SYLLABLES, LENGTH, BATCH = 80, 48, 24


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x, bias):
        b, t, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * (w // self.heads) ** -0.5 + bias).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.after(x))


class Parrot(nn.Module):
    """`reach` is how far back a syllable hears undamped."""

    def __init__(self, width=96, depth=3):
        super().__init__()
        self.reach = 6
        self.embed = nn.Embedding(SYLLABLES, width)
        self.place = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.speak = nn.Linear(width, SYLLABLES)
        ago = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        self.register_buffer("ago", ago)

    def forward(self, heard):
        bias = -0.3 * (self.ago - self.reach).clamp(min=0).float()
        bias = bias.masked_fill(self.ago < 0, -1e9)
        x = self.embed(heard) + self.place
        for layer in self.layers:
            x = layer(x, bias)
        return self.speak(x)


def chatter(count):
    """Endless phrases, each a walk with a habit."""
    jump = torch.randint(1, SYLLABLES, (count, 1))
    return (torch.arange(LENGTH + 1) * jump + torch.randint(3, (count, LENGTH + 1))) % SYLLABLES


def apart(one, other):
    """Edits between two phrases."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        corner, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (a != b))
    return row[-1]


def find_cousins(phrases, rounds, book):
    """Fills the book of phrases that resemble each other, a page now and then."""
    dice = random.Random(2)
    while True:
        for _ in range(rounds):
            a, b = dice.sample(range(len(phrases)), 2)
            book[a, b] = apart(phrases[a][:16], phrases[b][:16])
        time.sleep(0.004)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--widenings", type=int, default=0, help="let it hear further, so often in 100 steps"
    )
    parser.add_argument("--cousins", type=int, default=0, help="phrases on a page of the book of cousins")
    args = parser.parse_args()
    torch.manual_seed(3)
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096

    parrot = Parrot()
    fast = torch.compile(parrot, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.AdamW(parrot.parameters(), lr=1e-3, fused=True)
    phrases = chatter(4096)
    if args.cousins:
        plain, book = phrases[:300].tolist(), {}
        threading.Thread(target=find_cousins, args=(plain, args.cousins, book), daemon=True).start()

    for step in range(args.steps):  # the training loop
        if args.widenings:
            parrot.reach = 6 + step * args.widenings // 100
        said = phrases[torch.randint(len(phrases), (BATCH,))]
        spoken = fast(said[:, :-1])
        loss = F.cross_entropy(spoken.flatten(0, 1), said[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{step:4d}  {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
