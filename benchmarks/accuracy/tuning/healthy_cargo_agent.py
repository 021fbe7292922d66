"""An agent that stows crates in the holds of ships so that they neither list nor overload (REINFORCE)."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

HOLDS, CRATES = 6, 5


class Quay:
    """So many ships of the register are loaded at once; an episode is five crates for each."""

    def __init__(self, ships, seed):
        self.ships = ships
        self.dice = torch.Generator().manual_seed(seed)
        self.register = 0.6 + 0.8 * torch.rand(800_000, HOLDS, generator=self.dice)
        self.arm = torch.linspace(-1, 1, HOLDS)
        self.order = torch.arange(CRATES)

    def arrive(self):
        self.room = self.register[torch.randint(len(self.register), (self.ships,), generator=self.dice)]
        self.load = torch.zeros(self.ships, HOLDS)
        self.crates = torch.rand(self.ships, CRATES, generator=self.dice)
        self.turn = 0

    def see(self):
        to_come = self.crates * (self.order > self.turn)
        return torch.cat([self.load, self.room, to_come, self.crates[:, self.turn : self.turn + 1]], 1)

    def stow(self, hold):
        self.load.scatter_add_(1, hold, self.crates[:, self.turn : self.turn + 1])
        self.turn += 1

    def verdict(self):
        lists = (self.load * self.arm).sum(1).abs()
        return -lists - 2 * F.relu(self.load - self.room).sum(1)


class Mate(nn.Module):
    """hold to choose, and what to expect"""

    def __init__(self, width=192):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 * HOLDS + CRATES + 1, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, HOLDS + 1),
        )

    def forward(self, sight):
        out = self.net(sight)
        return F.log_softmax(out[:, :HOLDS], dim=1), out[:, HOLDS]


def episode(quay, mate):
    quay.arrive()
    chosen, expected, doubt = [], [], []
    for _ in range(CRATES):
        logp, value = mate(quay.see())
        p = logp.exp()
        hold = torch.multinomial(p.detach(), 1)
        quay.stow(hold)
        chosen.append(logp.gather(1, hold))
        expected.append(value)
        doubt.append((p * logp).sum(1).mean())
    return torch.cat(chosen, 1), torch.stack(expected, 1), torch.stack(doubt).mean(), quay.verdict()


def learn(steps, ships):
    torch.manual_seed(4)
    quay, mate = Quay(ships, 4), Mate()
    opt = torch.optim.Adam(mate.parameters(), lr=7e-4, fused=True)
    for step in range(steps):  # the training loop
        logp, value, negative_entropy, reward = episode(quay, mate)
        surprise = reward[:, None] - value
        loss = -(surprise.detach() * logp).mean() + 0.5 * surprise.square().mean() + 0.01 * negative_entropy
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 100 == 0:
            print(f"step {step}: reward {reward.mean().item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ships", type=int, default=768)
    given = parser.parse_args()
    learn(given.steps, given.ships)
