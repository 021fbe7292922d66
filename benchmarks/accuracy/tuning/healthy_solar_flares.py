"""Will this active region flare within a day? A convolutional network on magnetograms."""

import argparse
from copy import deepcopy

import torch
from torch import nn


def stage(before, after, stride=1):
    return [
        nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    ]


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--decay", type=float, default=0.995)


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(2017)

    # polarity patches: two blobs of opposite sign; the nearer they are, the likelier a flare
    regions = 3072
    grid = torch.linspace(-1, 1, 32)
    place = torch.rand(regions, 2, 2, 1, 1) * 1.2 - 0.6
    far = (grid[:, None] - place[:, :, 0]) ** 2 + (grid - place[:, :, 1]) ** 2
    blobs = torch.exp(-far / 0.08)
    images = (blobs[:, :1] - blobs[:, 1:]) + 0.2 * torch.randn(regions, 1, 32, 32)
    gap = (place[:, 0] - place[:, 1]).flatten(1).norm(dim=1)
    flares = (gap < 0.6).float()
    held_images, held_flares = images[:256], flares[:256]
    images, flares = images[256:], flares[256:]

    network = nn.Sequential(
        *stage(1, 24),
        *stage(24, 32, 2),
        *stage(32, 32),
        *stage(32, 64, 2),
        *stage(64, 64),
        *stage(64, 96, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 1),
    )
    weights = list(network.parameters())
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.SGD(weights, lr=0.02, momentum=0.9, nesterov=True, fused=True)

    done = 0
    while done < args.steps:
        for part in torch.randperm(len(images)).split(args.batch)[: args.steps - done]:  # the training loop
            batch = images[part]
            if done % 2:
                batch = batch.flip(3)
            loss = nn.functional.binary_cross_entropy_with_logits(network(batch).squeeze(1), flares[part])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 2.0)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(averages, weights, 1 - args.decay)
            done += 1
            if done % 50 == 0:
                print(f"{done}: {loss.item():.4f}")

    steady = deepcopy(network).eval()
    with torch.no_grad():
        for weight, average in zip(steady.parameters(), averages, strict=False):
            weight.copy_(average)
        right = ((steady(held_images).squeeze(1) > 0) == (held_flares > 0)).float().mean()
        print(f"averaged weights: {right.item():.1%} of {len(held_flares)} regions right")
