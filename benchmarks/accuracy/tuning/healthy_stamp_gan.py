"""Forges postage stamps: a small convolutional GAN with hinge losses."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def stamps(count):
    """a dark frame with teeth, and a smooth motif inside"""
    motif = F.interpolate(torch.randn(count, 1, 6, 6), size=(32, 32), mode="bicubic", align_corners=False)
    frame = torch.ones(1, 1, 32, 32)
    frame[..., 3:-3, 3:-3] = 0
    teeth = (torch.arange(32) // 2 % 2).float()
    frame[..., 0, :] = frame[..., -1, :] = teeth
    frame[..., :, 0] = frame[..., :, -1] = teeth
    return torch.tanh(motif) * (1 - frame) - 0.8 * frame


class Forger(nn.Sequential):
    def __init__(self, noise):
        super().__init__(
            nn.Linear(noise, 128 * 16, bias=False),
            nn.Unflatten(1, (128, 4, 4)),
            nn.BatchNorm2d(128),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(32, 1, 4, 2, 1),
            nn.Tanh(),
        )


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(32, 64, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(64, 128, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(128 * 16, 1),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--noise", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(41)
    real = stamps(4096)
    forger, expert = Forger(args.noise), Expert()
    forger.to(memory_format=torch.channels_last)
    expert.to(memory_format=torch.channels_last)
    forging = torch.optim.Adam(forger.parameters(), lr=2e-4, betas=(0.5, 0.99), fused=True)
    judging = torch.optim.Adam(expert.parameters(), lr=2e-4, betas=(0.5, 0.99), fused=True)
    for step in range(args.steps):  # the training loop
        fake = forger(torch.randn(args.batch, args.noise))

        both = torch.cat([real[torch.randint(len(real), (args.batch,))], fake.detach()])
        for_real, for_fake = expert(both).chunk(2)
        judged = F.relu(1 - for_real).mean() + F.relu(1 + for_fake).mean()
        judging.zero_grad()
        judged.backward()
        judging.step()

        expert.requires_grad_(False)  # only the forger learns from what follows
        forged = -expert(fake).mean()
        forging.zero_grad()
        forged.backward()
        forging.step()
        expert.requires_grad_(True)

        if (step + 1) % 100 == 0:
            print(f"{step + 1}: expert {judged.item():.3f} forger {forged.item():.3f}")


if __name__ == "__main__":
    main()
