"""A small hinge GAN that draws fields of clouds: two critic updates for one of the generator, averaged weights."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

SIDE, LATENT = 32, 32


def clouds(n, gen):
    """fractal noise, clipped from below: patches of cloud in a clear sky"""
    field = torch.zeros(n, 1, SIDE, SIDE)
    for k in (2, 4, 8, 16):
        coarse = torch.randn(n, 1, k, k, generator=gen)
        field += F.interpolate(coarse, SIDE, mode="bicubic", align_corners=False) / k**0.7
    return field.sub_(0.2).clamp_(0, 1).mul_(2).sub_(1)


class Generator(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.width = width
        self.start = nn.Linear(LATENT, width * 16)
        self.stages = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, z):
        x = self.start(z).view(-1, self.width, 4, 4)
        for stage in self.stages:
            x = F.leaky_relu(stage(F.interpolate(x, scale_factor=2)), 0.2)
        return self.last(x).tanh()


def critic(width=16):
    c = lambda i, o: spectral_norm(nn.Conv2d(i, o, 4, 2, 1))
    return nn.Sequential(
        c(1, width),
        nn.LeakyReLU(0.2),
        c(width, 2 * width),
        nn.LeakyReLU(0.2),
        c(2 * width, 2 * width),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 1),
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    args = ap.parse_args()
    torch.manual_seed(8)
    sky = clouds(4096, torch.Generator().manual_seed(1))
    g, d = Generator(), critic()
    smooth = copy.deepcopy(g).requires_grad_(False)
    pairs = [list(smooth.parameters()), list(g.parameters())]
    opt_g = torch.optim.Adam(g.parameters(), lr=2e-4, betas=(0.0, 0.9), fused=True)
    opt_d = torch.optim.Adam(d.parameters(), lr=4e-4, betas=(0.0, 0.9), fused=True)
    batch = 12

    for step in range(args.steps):  # the training loop
        for _ in range(2):
            real = sky[torch.randint(len(sky), (batch,))]
            with torch.no_grad():
                fake = g(torch.randn(batch, LATENT))
            score = d(torch.cat([real, fake]))
            loss_d = F.relu(1 - score[:batch]).mean() + F.relu(1 + score[batch:]).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()

        d.requires_grad_(False)
        loss_g = -d(g(torch.randn(batch, LATENT))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        d.requires_grad_(True)
        torch._foreach_lerp_(pairs[0], pairs[1], 0.01)

        if step % 40 == 39:
            with torch.no_grad():
                cover = (smooth(torch.randn(16, LATENT)) > 0).float().mean()
            print(
                f"{step + 1}: critic {loss_d.item():.3f} generator {loss_g.item():.3f} cover {cover.item():.2f}"
            )


if __name__ == "__main__":
    main()
