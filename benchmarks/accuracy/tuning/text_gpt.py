"""Trains a character model on made-up text; `get_batch` cuts the windows, there is no DataLoader."""

import argparse
import math
import queue
import random
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,;"
WIDTH = 64
EVAL_EVERY = 30


class Block(nn.Module):
    def __init__(self, heads, own_attention):
        super().__init__()
        self.heads, self.own_attention = heads, own_attention
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.own_attention:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            mask = torch.ones(time, time).tril() == 0
            y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.mlp(self.norm2(x))


class CharModel(nn.Module):
    def __init__(self, window, layers, heads, own_attention):
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), WIDTH)
        self.places = nn.Parameter(torch.zeros(window, WIDTH))
        self.blocks = nn.Sequential(*(Block(heads, own_attention) for _ in range(layers)))
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, letters):
        return self.head(self.blocks(self.letters(letters) + self.places))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=161)
parser.add_argument("--window", type=int, default=64)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument(
    "--encode-rounds", type=int, default=0, help="times the text of a batch is encoded anew"
)
parser.add_argument("--eval-batches", type=int, default=0)
parser.add_argument("--clip-passes", type=int, default=0, help="passes of the gradient clipping")
parser.add_argument("--averages", type=int, default=0, help="moving averages of the weights")
parser.add_argument("--fetch-ms", type=float, default=0, help="what a thread waits for each batch")
parser.add_argument("--own-attention", action="store_true")
parser.add_argument("--debug", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
rng = random.Random(0)
text = "".join(rng.choice(ALPHABET) for _ in range(50_000))
code = {letter: number for number, letter in enumerate(ALPHABET)}
encoded = torch.tensor([code[letter] for letter in text])


def get_batch():
    starts = [rng.randrange(len(text) - args.window - 1) for _ in range(args.batch)]
    for _ in range(args.encode_rounds):
        torch.tensor([[code[letter] for letter in text[s : s + args.window]] for s in starts])
    x = torch.stack([encoded[s : s + args.window] for s in starts])
    y = torch.stack([encoded[s + 1 : s + 1 + args.window] for s in starts])
    return x, y


def fetch_ahead(ahead):
    while True:
        time.sleep(args.fetch_ms / 1000)
        ahead.put(get_batch())


def clip(parameters, limit):
    total = 0.0
    for p in parameters:
        total += p.grad.norm().item() ** 2
    scale = min(1.0, limit / (math.sqrt(total) + 1e-6))
    for p in parameters:
        p.grad.mul_(scale)


def update_average(average, model, decay=0.999):
    with torch.no_grad():
        for old, new in zip(average.values(), model.state_dict().values(), strict=True):
            old.mul_(decay).add_(new, alpha=1 - decay)


@torch.no_grad()
def evaluate():
    model.eval()
    losses = []
    for _ in range(args.eval_batches):
        x, y = get_batch()
        losses.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
    model.train()
    return sum(losses) / len(losses)


model = CharModel(args.window, args.layers, args.heads, args.own_attention)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
parameters = list(model.parameters())
averages = [{k: v.clone() for k, v in model.state_dict().items()} for _ in range(args.averages)]
fetched = queue.Queue(4)
if args.fetch_ms:
    threading.Thread(target=fetch_ahead, args=(fetched,), daemon=True).start()
torch.autograd.set_detect_anomaly(args.debug, check_nan=args.debug)

for step in range(args.steps):  # the training loop
    x, y = fetched.get() if args.fetch_ms else get_batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    for _ in range(args.clip_passes):
        clip(parameters, 1.0)
    optimizer.step()
    for average in averages:
        update_average(average, model)
    if args.eval_batches and step % EVAL_EVERY == EVAL_EVERY - 1:
        print(f"step {step}: {evaluate():.4f}")
