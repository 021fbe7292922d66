"""A GAN that draws height profiles of clouds; the generator that is kept is an average."""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F

NOISE, HEIGHTS = 64, 128


def soundings(count, g):
    z = torch.linspace(0, 1, HEIGHTS)
    base = 0.2 + 0.3 * torch.rand(count, 1, generator=g)
    top = base + 0.1 + 0.4 * torch.rand(count, 1, generator=g)
    inside = torch.sigmoid((z - base) * 60) * torch.sigmoid((top - z) * 30)
    return inside * (1 + 0.2 * torch.randn(count, HEIGHTS, generator=g))


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class Gan:
    def __init__(self):
        self.g = mlp(NOISE, 256, 384, 256, HEIGHTS)
        self.d = mlp(HEIGHTS, 256, 256, 128, 1)
        self.kept = copy.deepcopy(self.g).requires_grad_(False)
        self.pair = list(self.kept.parameters()), [p.detach() for p in self.g.parameters()]
        self.g_opt = torch.optim.Adam(self.g.parameters(), 2e-4, betas=(0.5, 0.99), fused=True)
        self.d_opt = torch.optim.Adam(self.d.parameters(), 4e-4, betas=(0.5, 0.99), fused=True)

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.g(torch.randn(len(real), NOISE))
        verdict = self.d(torch.cat([real, fake]))
        on_real, on_fake = verdict.chunk(2)
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.detach()

    def artist_step(self, size):
        self.d.requires_grad_(False)
        loss = F.softplus(-self.d(self.g(torch.randn(size, NOISE)))).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        self.d.requires_grad_(True)
        return loss.detach()

    @torch.no_grad()
    def average(self):
        torch._foreach_lerp_(*self.pair, 0.002)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(41)
    clouds = soundings(20_000, torch.Generator().manual_seed(41))
    gan = Gan()
    for step in range(1, args.steps + 1):  # the training loop
        real = clouds[torch.randint(len(clouds), (384,))]
        d_loss = gan.critic_step(real)
        g_loss = gan.artist_step(384)
        gan.average()
        if step % 100 == 0:
            print(f"step {step}: critic {d_loss:.3f} artist {g_loss:.3f}", flush=True)
            with torch.no_grad():
                print("   spread of the average's clouds", gan.kept(torch.randn(64, NOISE)).std().item())


if __name__ == "__main__":
    main()
