"""Generates daily load curves: a critic, whose slope is held at 1, teaches a generator (WGAN-GP).

The critic gets four updates for each of the generator's. Its penalty needs gradients of gradients.
"""

import argparse
import itertools
import math
from contextlib import contextmanager

import torch
from torch import Tensor, nn

HOURS = 96  # quarters of hours of a day
NOISE = 32
ROWS = 384


def curves(count: int) -> Tensor:
    """Days with a morning and an evening peak."""
    clock = torch.linspace(0, 1, HOURS)
    when = torch.tensor([0.33, 0.8]) + 0.04 * torch.randn(count, 2)
    wide = 0.04 + 0.03 * torch.rand(count, 2)
    high = 0.5 + torch.rand(count, 2)
    peaks = high[..., None] * torch.exp(-(((clock - when[..., None]) / wide[..., None]) ** 2))
    return peaks.sum(1) + 0.1 * torch.sin(2 * math.pi * clock) + 0.02 * torch.randn(count, HOURS)


@contextmanager
def held(model: nn.Module):
    """Gradients go through the model, but none are computed for its parameters."""
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)


class Game:
    CRITIC_UPDATES = 4
    SLOPE_WEIGHT = 10.0

    def __init__(self, days: Tensor) -> None:
        self.days = days
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, HOURS)
        )
        self.critic = nn.Sequential(
            nn.Linear(HOURS, 256), nn.Softplus(), nn.Linear(256, 256), nn.Softplus(), nn.Linear(256, 1)
        )
        settings = {"lr": 2e-4, "betas": (0.0, 0.9), "fused": True}
        self.of_generator = torch.optim.Adam(self.generator.parameters(), **settings)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), **settings)
        self.distance = torch.zeros(())

    def turns(self):
        """Whose turn it is."""
        return itertools.cycle([self.teach_critic] * self.CRITIC_UPDATES + [self.teach_generator])

    def teach_critic(self) -> None:
        real = self.days[torch.randint(len(self.days), (ROWS,))]
        with torch.no_grad():
            made = self.generator(torch.randn(ROWS, NOISE))
        verdicts = self.critic(torch.cat([real, made]))
        distance = verdicts[:ROWS].mean() - verdicts[ROWS:].mean()

        between = real.lerp(made, torch.rand(ROWS, 1)).requires_grad_()
        (slopes,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slopes.norm(dim=1) - 1).square().mean()

        self.of_critic.zero_grad()
        (self.SLOPE_WEIGHT * penalty - distance).backward(inputs=list(self.critic.parameters()))
        self.of_critic.step()
        self.distance.lerp_(distance.detach(), 0.05)

    def teach_generator(self) -> None:
        with held(self.critic):
            loss = -self.critic(self.generator(torch.randn(ROWS, NOISE))).mean()
        self.of_generator.zero_grad()
        loss.backward()
        self.of_generator.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="updates of either network")
    steps = parser.parse_args().steps
    torch.manual_seed(8)
    game = Game(curves(20_000))
    for step, turn in enumerate(itertools.islice(game.turns(), steps), 1):  # the training loop
        turn()
        if step % 100 == 0:
            print(f"{step}: distance {game.distance.item():.3f}")


if __name__ == "__main__":
    main()
