"""Trains a small convolutional network to name the shape in a photograph-like JPEG.

The pictures are drawn on the first run and kept in a folder, as a downloaded dataset would be. Each
epoch decodes all of them again, on the training thread unless `--workers` says otherwise; what is random
is done to the batch.

    python examples/image_classifier.py
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import nn
from torch.utils.data import DataLoader, Dataset

SHAPES = ("disc", "square", "triangle", "kite", "ring", "diamond", "bar", "star")
PICTURE_SIZE = 512
INPUT_SIZE = 32
MAX_SHIFT = 3


def corners_of(shape: str, radius: float, angle: float) -> list[tuple[float, float]]:
    """Returns the corners of a shape around the origin; none for the round ones."""
    outlines = {
        "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
        "triangle": [(0, -1), (0.87, 0.5), (-0.87, 0.5)],
        "diamond": [(0, -1), (0.5, 0), (0, 1), (-0.5, 0)],
        "bar": [(-1, -0.25), (1, -0.25), (1, 0.25), (-1, 0.25)],
        "kite": [(0, -1), (0.6, -0.4), (0, 1), (-0.6, -0.4)],
        "star": [
            (reach * np.sin(k * np.pi / 5), -reach * np.cos(k * np.pi / 5))
            for k, reach in enumerate([1.0, 0.4] * 5)
        ],
    }
    cos, sin = np.cos(angle) * radius, np.sin(angle) * radius
    return [(cos * x - sin * y, sin * x + cos * y) for x, y in outlines.get(shape, [])]


def draw_picture(seed: int) -> Image.Image:
    """Draws the picture with this number: one shape, blurred, on a noisy background."""
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    noise = rng.integers(80, 176, (PICTURE_SIZE // 8, PICTURE_SIZE // 8, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.BICUBIC)
    radius = rng.uniform(0.2, 0.4) * PICTURE_SIZE
    x, y = rng.uniform(0.4, 0.6, 2) * PICTURE_SIZE
    color = tuple(int(value) for value in rng.choice((10, 245), 3))
    draw = ImageDraw.Draw(picture)
    if shape in ("disc", "ring"):
        width = int(radius * 0.35) if shape == "ring" else 0
        fill = color if shape == "disc" else None
        box = (x - radius, y - radius, x + radius, y + radius)
        draw.ellipse(box, fill=fill, outline=color, width=width)
    else:
        corners = corners_of(shape, radius, rng.uniform(-0.3, 0.3))
        draw.polygon([(x + dx, y + dy) for dx, dy in corners], fill=color)
    return picture.filter(ImageFilter.GaussianBlur(rng.uniform(0, 2)))


def make_pictures(folder: Path, seeds: range) -> list[Path]:
    """Returns the JPEG file of each seed, drawing those that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{seed:05d}.jpg" for seed in seeds]
    for seed, path in zip(seeds, paths, strict=True):
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}.part")
            draw_picture(seed).save(unfinished, format="JPEG", quality=90)
            unfinished.replace(path)
    return paths


class Pictures(Dataset):
    """JPEG files, decoded and made small when asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        picture = Image.open(path).convert("RGB")
        picture = picture.resize((INPUT_SIZE, INPUT_SIZE), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return pixels.float() / 127.5 - 1, int(path.stem) % len(SHAPES)


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Returns the batch mirrored, shifted, brighter or darker, of more or less contrast, at random."""
    if random.random() < 0.5:
        images = images.flip(3)
    left, top = random.randrange(2 * MAX_SHIFT + 1), random.randrange(2 * MAX_SHIFT + 1)
    images = nn.functional.pad(images, (MAX_SHIFT,) * 4, mode="reflect")
    images = images[:, :, top : top + INPUT_SIZE, left : left + INPUT_SIZE]
    contrast = torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(0.6, 1.4)
    brightness = torch.empty_like(contrast).uniform_(-0.3, 0.3)
    return images * contrast + brightness


class SmallConvNet(nn.Module):
    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 3
        for factor in (1, 2, 4):
            blocks += [
                nn.Conv2d(channels, factor * width, 3, padding=1, bias=False),
                nn.BatchNorm2d(factor * width),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
            channels = factor * width
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(channels * 16, num_classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Returns the share of pictures named correctly."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        predicted = model(images.to(device)).argmax(dim=1)
        correct += (predicted == labels.to(device)).sum().item()
        total += labels.numel()
    model.train()
    return correct / total


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(tempfile.gettempdir(), f"shapes-jpeg-{PICTURE_SIZE}"),
        help="folder for the pictures and the checkpoint",
    )
    parser.add_argument("--train-pictures", type=int, default=320)
    parser.add_argument("--test-pictures", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-weights", type=Path, help="where to save the final weights")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    paths = make_pictures(args.data, range(args.train_pictures + args.test_pictures))
    train_set = Pictures(paths[: args.train_pictures])
    test_set = Pictures(paths[args.train_pictures :])
    train_loader = DataLoader(
        train_set, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers
    )
    test_loader = DataLoader(test_set, args.batch_size, num_workers=args.workers)
    print(f"{len(train_set)} pictures to train on, {len(test_set)} to test on")

    model = SmallConvNet(len(SHAPES)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    num_steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=num_steps)

    for epoch in range(args.epochs):
        running_loss = 0.0
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(augmented(images)), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running_loss += loss.item()
        accuracy = evaluate(model, test_loader, device)
        train_loss = running_loss / len(train_loader)
        print(f"epoch {epoch + 1}: train loss {train_loss:.4f}, test accuracy {accuracy:.3f}")
        state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.data / "checkpoint.pt")

    if args.save_weights:
        torch.save(model.state_dict(), args.save_weights)


if __name__ == "__main__":
    main()
