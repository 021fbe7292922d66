"""A Wasserstein GAN of woven bands: the critic has a penalty on its slope, the weaver is moved every third step."""

import argparse
import itertools

import torch
from torch import autograd, nn

WARP, NOISE = 96, 24


def woven(count, dice):
    """Bands of two periods, slightly uneven."""
    x = torch.arange(WARP)
    period = torch.randint(4, 13, (count, 2), generator=dice)
    shift = 6.28 * torch.rand(count, 2, generator=dice)
    waves = torch.sin(6.28 * x / period[:, :, None] + shift[:, :, None])
    return waves.prod(1) + 0.05 * torch.randn(count, WARP, generator=dice)


def mlp(*sizes, last=None):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    layers.pop()
    return nn.Sequential(*layers, *([last] if last else []))


def slope_penalty(critic, real, fake):
    mix = torch.lerp(fake, real, torch.rand(len(real), 1)).requires_grad_()
    (slope,) = autograd.grad(critic(mix).sum(), mix, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dice = torch.Generator().manual_seed(41)
    torch.manual_seed(41)
    cloth = woven(6000, dice)
    weaver, critic = mlp(NOISE, 320, 320, WARP, last=nn.Tanh()), mlp(WARP, 320, 320, 1)
    for_weaver = torch.optim.Adam(weaver.parameters(), lr=3e-4, betas=(0.0, 0.9), fused=True)
    for_critic = torch.optim.Adam(critic.parameters(), lr=3e-4, betas=(0.0, 0.9), fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(for_critic, 0.999)
    distance = torch.zeros(())
    done = 0
    while done < args.steps:  # the training loop
        done += 1
        if done % 3 == 0:
            critic.requires_grad_(False)
            loss = -critic(weaver(torch.randn(320, NOISE))).mean()
            for_weaver.zero_grad()
            loss.backward()
            for_weaver.step()
            critic.requires_grad_(True)
            continue
        real = cloth[torch.randint(len(cloth), (320,))]
        with torch.no_grad():
            fake = weaver(torch.randn(320, NOISE))
        gap = critic(fake).mean() - critic(real).mean()
        for_critic.zero_grad()
        (gap + 10 * slope_penalty(critic, real, fake)).backward()
        for_critic.step()
        schedule.step()
        distance.lerp_(-gap.detach(), 0.1)
        if done % 50 == 2:
            print(f"{done}: distance {distance.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
