"""The transforms that the scripts name on the paths they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class ToTensor:
    def __call__(self, picture: Image.Image) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(picture))
        if pixels.ndim == 2:
            pixels = pixels.unsqueeze(2)
        return pixels.permute(2, 0, 1).contiguous().float() / 255


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels - self.mean) / self.std
