"""Datasets of random pictures: the same picture for the same index, whoever asks and however often."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset

LIMIT = int(os.environ.get("STANDIN_PICTURES", "256"))


class _RandomPictures(Dataset):
    def __init__(self, num_pictures: int, num_classes: int, transform: Callable[[Any], Any] | None) -> None:
        self.num_pictures = min(num_pictures, LIMIT)
        self.num_classes = num_classes
        self.transform = transform

    def __len__(self) -> int:
        return self.num_pictures

    def __getitem__(self, index: int) -> tuple[Any, int]:
        generator = torch.Generator().manual_seed(index)
        target = int(torch.randint(self.num_classes, (), generator=generator))
        picture = self.draw(target, generator)
        return (picture if self.transform is None else self.transform(picture)), target

    def draw(self, target: int, generator: torch.Generator) -> Image.Image:
        raise NotImplementedError


class FakeData(_RandomPictures):
    """Noise of the size asked for."""

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, int, int] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(size, num_classes, transform)
        self.image_size = image_size

    def draw(self, target: int, generator: torch.Generator) -> Image.Image:
        channels, height, width = self.image_size
        pixels = torch.randint(256, (height, width, channels), generator=generator, dtype=torch.uint8)
        return Image.fromarray(pixels.numpy())


class MNIST(_RandomPictures):
    """28 x 28 pictures with a bright block whose place tells the digit."""

    def __init__(
        self,
        root: str,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        super().__init__(60_000 if train else 10_000, 10, transform)

    def draw(self, target: int, generator: torch.Generator) -> Image.Image:
        pixels = torch.randint(64, (28, 28), generator=generator, dtype=torch.uint8)
        row, column = 2 + 12 * (target // 5), 2 + 5 * (target % 5)
        pixels[row : row + 10, column : column + 4] += 150
        return Image.fromarray(pixels.numpy())
