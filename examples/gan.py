"""Trains a small GAN, two networks with an optimizer each, to draw soft rings.

python examples/gan.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIZE = 16


def make_rings(num_images: int, generator: torch.Generator) -> TensorDataset:
    """Makes 16 x 16 images of a ring each, with random centre, radius and thickness."""
    axis = torch.arange(SIZE, dtype=torch.float32)
    center = 5 + 5 * torch.rand(num_images, 2, 1, 1, generator=generator)
    radius = 2.5 + 2 * torch.rand(num_images, 1, 1, generator=generator)
    thickness = 0.6 + 0.6 * torch.rand(num_images, 1, 1, generator=generator)
    distance = torch.hypot(axis[None, :, None] - center[:, 0], axis[None, None, :] - center[:, 1])
    images = 2 * torch.exp(-(((distance - radius) / thickness) ** 2)) - 1
    return TensorDataset(images.unsqueeze(1))


def make_generator(noise_size: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(noise_size, 2 * width, 4, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4),
        nn.Flatten(0),
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--noise-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-weights", type=Path, help="where to save the final weights")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    rings = make_rings(args.images, torch.Generator().manual_seed(args.seed))
    loader = DataLoader(rings, args.batch_size, shuffle=True, drop_last=True)
    generator = make_generator(args.noise_size, args.width).to(device)
    discriminator = make_discriminator(args.width).to(device)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(args.batch_size, device=device), torch.zeros(args.batch_size, device=device)
    print(f"{len(rings)} rings of {SIZE} x {SIZE}")

    for epoch in range(args.epochs):
        sum_d = sum_g = 0.0
        for (real,) in loader:
            real = real.to(device)
            noise = torch.randn(args.batch_size, args.noise_size, 1, 1, device=device)
            fake = generator(noise)

            optimizer_d.zero_grad()
            loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
            loss_d.backward()
            optimizer_d.step()

            optimizer_g.zero_grad()
            loss_g = criterion(discriminator(fake), ones)
            loss_g.backward()
            optimizer_g.step()

            sum_d += loss_d.item()
            sum_g += loss_g.item()
        mean_d, mean_g = sum_d / len(loader), sum_g / len(loader)
        print(f"epoch {epoch + 1}: discriminator loss {mean_d:.4f}, generator loss {mean_g:.4f}")

    if args.save_weights:
        weights = {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}
        torch.save(weights, args.save_weights)


if __name__ == "__main__":
    main()
