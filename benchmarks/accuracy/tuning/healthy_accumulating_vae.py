"""A variational autoencoder on digits in memory, with three micro-batches to an update."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

cli = argparse.ArgumentParser()
cli.add_argument("--steps", type=int, default=220)
steps = cli.parse_args().steps

torch.manual_seed(31)
digits = (torch.rand(6000, 784) > 0.8).float()


def sampled(size):
    """Rows of the digits in a new order each time round, and never fewer than asked for."""
    while True:
        for rows in torch.randperm(len(digits)).split(size):
            if len(rows) == size:
                yield digits[rows]


encoder = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 2 * 24))
decoder = nn.Sequential(nn.Linear(24, 512), nn.ReLU(), nn.Linear(512, 784))
both = nn.ModuleList([encoder, decoder])
optimizer = torch.optim.AdamW(both.parameters(), lr=1e-3, fused=True)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
batches = sampled(192)


def negative_elbo(x, weight):
    mean, spread = encoder(x).chunk(2, 1)
    code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    likelihood = F.binary_cross_entropy_with_logits(decoder(code), x, reduction="sum")
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
    return (likelihood + weight * divergence) / len(x)


for step in range(steps):  # the training loop
    for _ in range(3):
        loss = negative_elbo(next(batches), min(1.0, step / 60))
        (loss / 3).backward()
    nn.utils.clip_grad_norm_(both.parameters(), 50.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    warm_up.step()
    if step % 40 == 0:
        print(step, loss.item())
