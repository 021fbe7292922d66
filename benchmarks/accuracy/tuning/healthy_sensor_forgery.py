"""A generator of sensor traces against a critic with gradient penalty (WGAN-GP), to fill up rare classes.

The critic is updated four times as often as the generator; its penalty needs gradients of gradients. Each
update counts as a step, so four of five leave the generator alone.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import nn

CRITIC_UPDATES = 4
LENGTH, CHANNELS, NOISE, BATCH = 64, 6, 32, 96


def block(inputs, outputs):
    return nn.Sequential(nn.Conv1d(inputs, outputs, 5, stride=2, padding=2), nn.LeakyReLU(0.2))


def make_critic():
    return nn.Sequential(
        block(CHANNELS, 32), block(32, 64), block(64, 96), nn.Flatten(), nn.Linear(96 * LENGTH // 8, 1)
    )


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(NOISE, 96 * LENGTH // 8)
        self.grow = nn.Sequential(
            nn.ConvTranspose1d(96, 64, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose1d(64, 32, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose1d(32, CHANNELS, 4, stride=2, padding=1),
        )

    def forward(self, noise):
        return self.grow(F.relu(self.start(noise)).unflatten(1, (96, -1)))


def real_traces(count):
    """Damped oscillations with a phase for each channel."""
    ticks = torch.arange(LENGTH) / LENGTH
    pitch = 3 + 6 * torch.rand(count, 1, 1)
    phase = 6.28 * torch.rand(count, CHANNELS, 1)
    return torch.exp(-2 * ticks) * torch.sin(6.28 * pitch * ticks + phase)


def penalty(critic, real, fake):
    mix = torch.rand(len(real), 1, 1)
    between = torch.lerp(fake, real, mix).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def teach_critic(critic, generator, optimizer, real):
    with torch.no_grad():
        fake = generator(torch.randn(len(real), NOISE))
    judged_real, judged_fake = critic(torch.cat([real, fake])).chunk(2)
    loss = judged_fake.mean() - judged_real.mean() + 10 * penalty(critic, real, fake)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def teach_generator(critic, generator, optimizer, count):
    critic.requires_grad_(False)  # only the generator learns here
    loss = -critic(generator(torch.randn(count, NOISE))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    critic.requires_grad_(True)
    return loss.detach()


def shuffled(traces):
    while True:
        yield from traces[torch.randperm(len(traces))].split(BATCH)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    steps = parser.parse_args().steps

    torch.manual_seed(11)
    critic, generator = make_critic(), Generator()
    settings = {"lr": 2e-4, "betas": (0.0, 0.9), "fused": True}
    critic_optimizer = torch.optim.Adam(critic.parameters(), **settings)
    generator_optimizer = torch.optim.Adam(generator.parameters(), **settings)
    batches = shuffled(real_traces(BATCH * 16))
    turns = itertools.cycle([True] * CRITIC_UPDATES + [False])

    distance = forged = torch.zeros(())
    for _, critics_turn in zip(range(steps), turns, strict=False):  # the training loop
        if critics_turn:
            distance = teach_critic(critic, generator, critic_optimizer, next(batches))
        else:
            forged = teach_generator(critic, generator, generator_optimizer, BATCH)
    print(f"critic {distance.item():.3f}, generator {forged.item():.3f}")


if __name__ == "__main__":
    main()
