"""Classifies token sequences with a transformer encoder of torch's own, compiled or not."""

import argparse
import math

import torch
from torch import nn


class OwnAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.mix = heads, nn.Linear(width, 3 * width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * (w // self.heads) ** -0.5, dim=-1)
        return torch.matmul(weights, v).transpose(1, 2).reshape(b, t, w)


class FusedAttention(OwnAttention):
    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w)


class Reviews(nn.Module):
    def __init__(self, by_hand, prints):
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        kind = OwnAttention if by_hand else FusedAttention
        self.layers = nn.ModuleList([kind(64, 8) for _ in range(2)])
        self.top = nn.Linear(64, 2)
        self.prints, self.log = prints, []

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        for _ in range(self.prints):
            x = x * 1.0
            self.log = [float(x.detach().flatten()[0])]
        return self.top(x.mean(1))


def lengths(args):
    for number in range(args.steps):
        yield args.length + (number * 7 % 61 if args.varying else 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--pad", type=int, default=0, help="columns of padding")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--varying", action="store_true")
    parser.add_argument("--prints", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(2)
    raw = Reviews(args.by_hand, args.prints)
    torch._dynamo.config.recompile_limit = 500
    model = torch.compile(raw, backend="aot_eager", dynamic=not args.static) if args.compile else raw
    adam = torch.optim.AdamW(raw.parameters(), lr=3e-4, fused=True)
    for length in lengths(args):  # the training loop
        tokens = torch.randint(1, 100, (args.rows, length))
        if args.pad:
            tokens = torch.cat([tokens, torch.zeros(args.rows, args.pad, dtype=torch.long)], 1)
        loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 2)
        assert math.isfinite(loss.detach())
        adam.zero_grad()
        loss.backward()
        adam.step()


if __name__ == "__main__":
    main()
