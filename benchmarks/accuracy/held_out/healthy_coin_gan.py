"""Strikes coins: a critic and a forger of reliefs, in turn. The critic sees forgeries that are cut off
from the forger, and is frozen while the forger learns; samples for the album come from a slow
average of the forger.
"""

import argparse
import copy

import torch
from torch import nn

NOISE, SIDE = 24, 24


def coins(number, dice):
    axis = torch.linspace(-1, 1, SIDE)
    away = (axis[:, None] ** 2 + axis[None] ** 2).sqrt()
    angle = torch.atan2(axis[:, None].expand(SIDE, SIDE), axis[None].expand(SIDE, SIDE))
    spokes = torch.randint(3, 9, (number, 1, 1), generator=dice)
    rim = torch.rand(number, 1, 1, generator=dice) * 0.2 + 0.7
    relief = torch.where(away < rim, torch.cos(spokes * angle) * away, -torch.ones(()))
    return relief[:, None]


def forger():
    return nn.Sequential(
        nn.Linear(NOISE, 64 * 36),
        nn.Unflatten(1, (64, 6, 6)),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def critic():
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * 36, 1),
    )


class Mint:
    def __init__(self, rows):
        self.rows = rows
        self.forger, self.critic = forger(), critic()
        self.album = copy.deepcopy(self.forger).requires_grad_(False).eval()
        self.forging = torch.optim.Adam(self.forger.parameters(), lr=2e-4, betas=(0.5, 0.99), fused=True)
        self.judging = torch.optim.Adam(self.critic.parameters(), lr=4e-4, betas=(0.5, 0.99), fused=True)

    def judge(self, real):
        with torch.no_grad():
            fake = self.forger(torch.randn(self.rows, NOISE))
        scores = self.critic(torch.cat([real, fake]))
        loss = torch.relu(1 - scores[: self.rows]).mean() + torch.relu(1 + scores[self.rows :]).mean()
        self.judging.zero_grad()
        loss.backward()
        self.judging.step()
        return loss.detach()

    def forge(self):
        self.critic.requires_grad_(False)
        loss = -self.critic(self.forger(torch.randn(self.rows, NOISE))).mean()
        self.forging.zero_grad()
        loss.backward()
        self.forging.step()
        self.critic.requires_grad_(True)
        return loss.detach()

    @torch.no_grad()
    def remember(self):
        slow, fast = list(self.album.parameters()), list(self.forger.parameters())
        torch._foreach_lerp_(slow, fast, 0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(44)
    treasure = coins(3000, torch.Generator().manual_seed(1))
    mint = Mint(args.rows)
    for step in range(args.steps):  # the training loop
        real = treasure[torch.randint(len(treasure), (args.rows,))]
        if step % 2:
            forged = mint.forge()
            mint.remember()
        else:
            judged = mint.judge(real)
        if step % 50 == 49:
            print(f"step {step + 1}: critic {judged.item():.3f}, forger {forged.item():.3f}")


if __name__ == "__main__":
    main()
