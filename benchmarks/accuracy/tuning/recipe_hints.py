"""Expert iteration for a little model of recipes: it learns from a corpus, and from the best of its own drafts."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint_sequential

INGREDIENTS, CONTEXT = 200, 48


def corpus(count, generator):
    """Recipes: each ingredient is near the one two places before."""
    rows = torch.randint(0, INGREDIENTS, (count, CONTEXT + 1), generator=generator)
    moves = torch.randint(-3, 4, rows.shape, generator=generator)
    for i in range(2, CONTEXT + 1):
        rows[:, i] = (rows[:, i - 2] + moves[:, i]) % INGREDIENTS
    return rows


def taste(recipe):
    """A cook's rules of thumb."""
    score = 0.0
    for a, b, c in zip(recipe, recipe[1:], recipe[2:]):
        score -= math.log1p(min((c - a) % INGREDIENTS, (a - c) % INGREDIENTS))
        score -= 2.0 * (a == b)
    return score


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.mlp(self.norm2(x))


class Cook(nn.Module):
    def __init__(self, dim=64, depth=6, parts=0):
        super().__init__()
        self.parts = parts
        self.embed = nn.Embedding(INGREDIENTS, dim)
        self.place = nn.Parameter(torch.randn(CONTEXT, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, 4) for _ in range(depth)])
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, INGREDIENTS))

    def forward(self, x):
        x = self.embed(x) + self.place[: x.shape[1]]
        if self.parts and self.training:
            # so that it also trains on the old laptop in the kitchen
            x = checkpoint_sequential(self.blocks, self.parts, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return self.out(x)


@torch.no_grad()
def draft(model, starts, length):
    """Complete the starts, an ingredient at a time, and return the completion that tastes best."""
    model.eval()
    rows = starts
    for _ in range(length):
        logits = model(rows[:, -CONTEXT:])[:, -1]
        rows = torch.cat([rows, torch.multinomial(logits.softmax(1), 1)], 1)
    model.train()
    return max(rows.tolist(), key=taste)


def train(steps, batch, drafts, parts, seed=21):
    torch.manual_seed(seed)
    recipes = corpus(6000, torch.Generator().manual_seed(seed))
    model = Cook(parts=parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)
    drafts = min(drafts, CONTEXT)
    for step in range(steps):  # the training loop
        rows = recipes[torch.randint(len(recipes), (batch,))]
        if drafts:
            starts = rows[:6, : CONTEXT + 1 - drafts]
            rows[0] = torch.tensor(draft(model, starts, drafts))
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 40 == 39:
            print(f"step {step + 1} of {steps}: {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--drafts",
        type=int,
        default=0,
        help="ingredients that the model itself adds to a recipe, at most 48",
    )
    parser.add_argument(
        "--parts", type=int, default=0, help="run the blocks in so many parts and keep little in between"
    )
    args = parser.parse_args()
    train(args.steps, args.batch, args.drafts, args.parts)
