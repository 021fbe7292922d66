"""Fills masked residues of antibody loops, given their geometry; two micro-batches a step, on two ranks."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

RESIDUES, MASK, LENGTH, SHAPE = 20, 20, 48, 8


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_in(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_out(x))))


class LoopFiller(nn.Module):
    def __init__(self, width=96, heads=4, layers=2):
        super().__init__()
        self.residue = nn.Embedding(RESIDUES + 1, width)
        self.shape = nn.Linear(SHAPE, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.top = nn.Linear(width, RESIDUES)

    def forward(self, tokens, shape):
        return self.top(self.layers(self.residue(tokens) + self.shape(shape)))


def loops(amount, seed):
    made = torch.Generator().manual_seed(seed)
    shape = torch.randn(amount, LENGTH, SHAPE, generator=made)
    tokens = (shape[..., :4].sum(2).sigmoid() * RESIDUES).long().clamp(max=RESIDUES - 1)
    return tokens, shape


def micro_batch(tokens, shape, rows=10):
    picked = torch.randint(len(tokens), (rows,))
    native = tokens[picked]
    hidden = torch.rand(native.shape) < 0.4
    return native.masked_fill(hidden, MASK), shape[picked], native.masked_fill(~hidden, -100)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DistributedDataParallel(LoopFiller())
    torch.manual_seed(50 + rank)
    tokens, shape = loops(2000, seed=90 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(args.steps):  # the training loop
        for micro in range(2):
            given, around, wanted = micro_batch(tokens, shape)
            with model.no_sync() if micro == 0 else nullcontext():
                logits = model(given, around)
                loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100) / 2
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 50 == 0:
            print(f"{step:4d} {2 * loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
