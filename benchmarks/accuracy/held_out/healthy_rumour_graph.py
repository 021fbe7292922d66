"""Follows rumours through a village: who will have heard it tomorrow? Message passing on a fixed
graph.

The garbage collector only runs where it does not matter, the rate follows one cycle, and the
village's normalised adjacency is computed once.
"""

import argparse
import gc
from collections import deque

import torch
from torch import nn

VILLAGERS, FACTS = 1500, 24


class Village:
    def __init__(self, friends=8):
        dice = torch.Generator().manual_seed(1605)
        near = torch.randint(-40, 41, (VILLAGERS, friends), generator=dice)
        talks = torch.arange(VILLAGERS)[:, None].expand_as(near).reshape(-1)
        hears = ((torch.arange(VILLAGERS)[:, None] + near) % VILLAGERS).reshape(-1)
        weight = torch.full((len(talks),), 1.0 / friends)
        self.edges = (
            torch.sparse_coo_tensor(torch.stack([hears, talks]), weight, (VILLAGERS, VILLAGERS))
            .coalesce()
            .to_sparse_csr()
        )
        self.back = self.edges.to_dense().t().contiguous().to_sparse_csr()
        self.facts = torch.randn(VILLAGERS, FACTS, generator=dice)
        self.dice = dice

    def evening(self):
        heard = (torch.rand(VILLAGERS, 1, generator=self.dice) < 0.05).float()
        later = (self.edges @ (self.edges @ heard)) > 0.01
        return torch.cat([self.facts, heard], 1), later.float()


class Spread(torch.autograd.Function):
    """The product with the fixed graph, with its transpose at hand for the way back."""

    @staticmethod
    def forward(ctx, x, edges, back):
        ctx.back = back
        return edges @ x

    @staticmethod
    def backward(ctx, slope):
        return ctx.back @ slope, None, None


class Gossip(nn.Module):
    def __init__(self, width=96, hops=3):
        super().__init__()
        self.enter = nn.Linear(FACTS + 1, width)
        self.hops = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(hops)])
        self.leave = nn.Linear(width, 1)

    def forward(self, x, village):
        x = torch.relu(self.enter(x))
        for hop in self.hops:
            told = Spread.apply(x, village.edges, village.back)
            x = x + torch.relu(hop(torch.cat([x, told], 1)))
        return self.leave(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(5)
    village, model = Village(), Gossip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1)
    lately = deque(maxlen=20)
    gc.freeze()
    gc.disable()
    for step in range(steps):  # the training loop
        x, later = village.evening()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x, village), later)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        cycle.step()
        lately.append(loss.detach())
        if (step + 1) % 100 == 0:
            gc.collect()
            print(
                f"evening {step + 1}: {torch.stack(list(lately)).mean():.4f}, rate", cycle.get_last_lr()[0]
            )
    gc.enable()


if __name__ == "__main__":
    main()
