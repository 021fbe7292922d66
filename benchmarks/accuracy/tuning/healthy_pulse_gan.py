"""A GAN for heart beats: the critic learns three times for each lesson of the generator."""

import argparse
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F

SAMPLES = 128


def make_beats(count):
    t = torch.linspace(0, 1, SAMPLES)
    centre = 0.5 + 0.05 * torch.randn(count, 1)
    width = 0.012 + 0.006 * torch.rand(count, 1)
    spike = torch.exp(-(((t - centre) / width) ** 2))
    before = 0.2 * torch.exp(-(((t - centre + 0.18) / 0.04) ** 2))
    after = (0.2 + 0.2 * torch.rand(count, 1)) * torch.exp(-(((t - centre - 0.25) / 0.06) ** 2))
    return (spike + before + after + 0.02 * torch.randn(count, SAMPLES))[:, None]


class Generator(nn.Module):
    def __init__(self, latent=32, c=64):
        super().__init__()
        self.c = c
        self.start = nn.Linear(latent, c * 16)
        self.body = nn.Sequential(
            nn.ConvTranspose1d(c, c, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose1d(c, c, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose1d(c, c // 2, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv1d(c // 2, 1, 5, padding=2),
        )

    def forward(self, z):
        return self.body(self.start(z).view(len(z), self.c, 16))


class Critic(nn.Module):
    def __init__(self, c=48):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, c, 7, 2, 3),
            nn.LeakyReLU(0.2),
            nn.Conv1d(c, c, 5, 2, 2),
            nn.LeakyReLU(0.2),
            nn.Conv1d(c, 2 * c, 5, 2, 2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * c * SAMPLES // 8, 1),
        )

    def forward(self, x):
        return self.body(x)


@contextmanager
def frozen(module):
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--batch", type=int, default=64)
    opt = ap.parse_args()

    torch.empty(30 << 20, dtype=torch.uint8)  # so that malloc keeps freed memory
    torch.manual_seed(99)
    real = make_beats(4000)
    gen, critic = Generator(), Critic()
    g_opt = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.9), fused=True)
    c_opt = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.9), fused=True)

    for step in range(opt.steps):  # the training loop
        beats = real[torch.randint(len(real), (opt.batch,))]
        z = torch.randn(opt.batch, 32)
        if step % 4 != 3:
            with torch.no_grad():
                fake = gen(z)
            scores = critic(torch.cat([beats, fake]))
            loss = F.relu(1 - scores[: opt.batch]).mean() + F.relu(1 + scores[opt.batch :]).mean()
            c_opt.zero_grad()
            loss.backward()
            c_opt.step()
        else:
            with frozen(critic):
                loss = -critic(gen(z)).mean()
                g_opt.zero_grad()
                loss.backward()
            g_opt.step()
        if step % 60 == 59:
            print(f"{step + 1:4d} generator's loss {loss.item():+.3f}")


if __name__ == "__main__":
    main()
