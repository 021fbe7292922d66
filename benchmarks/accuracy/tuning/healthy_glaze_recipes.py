"""Learns weights from which the glaze colours of a new kiln are a few updates away (first-order MAML)."""

import argparse
import math
from itertools import islice, pairwise

import torch
import torch.nn.functional as F
from torch import nn

KILNS, FIRINGS, OXIDES, COLOUR = 64, 192, 40, 3


def make_kilns():
    recipes = torch.rand(KILNS, FIRINGS, OXIDES)
    taste = torch.randn(OXIDES, COLOUR)
    own = taste + 0.4 * torch.randn(KILNS, OXIDES, COLOUR)
    return recipes, torch.sin(recipes @ own)


def meetings(recipes, colours, kilns):
    """Yields, again and again, some kilns with their firings split in two halves."""
    while True:
        tasks = []
        for kiln in torch.randperm(KILNS)[:kilns].tolist():
            known, unknown = torch.randperm(FIRINGS).chunk(2)
            here, shades = recipes[kiln], colours[kiln]
            tasks.append((here[known], shades[known], here[unknown], shades[unknown]))
        yield tasks


def fresh_weights(*widths):
    weights = []
    for before, after in pairwise(widths):
        weights.append(nn.Parameter(torch.randn(after, before) / math.sqrt(before)))
        weights.append(nn.Parameter(torch.zeros(after)))
    return weights


def colour_of(recipe, weights):
    for at in range(0, len(weights) - 2, 2):
        recipe = F.silu(F.linear(recipe, weights[at], weights[at + 1]))
    return F.linear(recipe, weights[-2], weights[-1])


def adapted(weights, recipes, colours, turns, rate):
    fast = [weight.detach().requires_grad_() for weight in weights]
    for _ in range(turns):
        slopes = torch.autograd.grad(F.mse_loss(colour_of(recipes, fast), colours), fast)
        with torch.no_grad():
            fast = list(torch._foreach_sub(fast, slopes, alpha=rate))
        for weight in fast:
            weight.requires_grad_()
    return fast


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kilns", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(64)
    recipes, colours = make_kilns()
    weights = fresh_weights(OXIDES, 256, 256, 256, COLOUR)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in weights]
    outer = torch.optim.Adam(weights, lr=1e-3, fused=True)
    source = islice(meetings(recipes, colours, args.kilns), args.steps)
    for number, tasks in enumerate(source, 1):  # the training loop
        outer.zero_grad(set_to_none=False)
        total = torch.zeros(())
        for recipe, colour, new_recipe, new_colour in tasks:
            fast = adapted(weights, recipe, colour, args.turns, rate=0.05)
            loss = F.mse_loss(colour_of(new_recipe, fast), new_colour)
            slopes = torch.autograd.grad(loss, fast)
            torch._foreach_add_(gradients, slopes, alpha=1 / len(tasks))
            total += loss.detach() / len(tasks)
        outer.step()
        if number % 40 == 0:
            print(f"{number:4d} after adaptation {total.item():.4f}")


if __name__ == "__main__":
    main()
