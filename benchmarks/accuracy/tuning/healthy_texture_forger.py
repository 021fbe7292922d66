# GAN for small fabric textures. The critic gets two updates, then the forger one.
import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=200, help="optimizer steps, of both together")
a = p.parse_args()
torch.manual_seed(77)

yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
angle, period = torch.rand(2000, 1, 1) * 3.14, torch.rand(2000, 1, 1) * 3 + 2
fabric = torch.sin((xx * angle.cos() + yy * angle.sin()) * 6.28 / period)[:, None]
fabric = fabric + 0.1 * torch.randn_like(fabric)

forger = nn.Sequential(
    nn.Linear(32, 64 * 16),
    nn.Unflatten(1, (64, 4, 4)),
    nn.ReLU(),
    nn.ConvTranspose2d(64, 64, 4, 2, 1),
    nn.ReLU(),
    nn.ConvTranspose2d(64, 48, 4, 2, 1),
    nn.ReLU(),
    nn.Conv2d(48, 1, 3, padding=1),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(1, 48, 3, padding=1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(48, 96, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(96, 96, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(96 * 16, 1),
)
forge_opt = torch.optim.Adam(forger.parameters(), lr=2e-4, betas=(0.5, 0.99), fused=True)
judge_opt = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.99), fused=True)
BATCH = 24


def judge():
    real = fabric[torch.randint(len(fabric), (BATCH,))]
    with torch.no_grad():
        fake = forger(torch.randn(BATCH, 32))
    scores = critic(torch.cat([real, fake]))
    loss = torch.relu(1 - scores[:BATCH]).mean() + torch.relu(1 + scores[BATCH:]).mean()
    judge_opt.zero_grad()
    loss.backward()
    judge_opt.step()
    return loss.detach()


def forge():
    critic.requires_grad_(False)
    loss = -critic(forger(torch.randn(BATCH, 32))).mean()
    forge_opt.zero_grad()
    loss.backward()
    forge_opt.step()
    critic.requires_grad_(True)
    return loss.detach()


for step in range(a.steps):  # the training loop
    if step % 3 == 2:
        lie = forge()
    else:
        truth = judge()
    if step % 60 == 59:
        print(f"{step + 1:5d}  critic {truth.item():+.3f}  forger {lie.item():+.3f}", flush=True)
