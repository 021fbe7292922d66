"""Writes a batch of pictures as one PNG."""

from __future__ import annotations

import torch
from PIL import Image


def save_image(images: torch.Tensor, path: str, normalize: bool = False, **unused: object) -> None:
    images = images.detach().cpu().float()
    if normalize:
        images = (images - images.min()) / (images.max() - images.min()).clamp(min=1e-5)
    row = torch.cat(list(images), dim=2).permute(1, 2, 0)
    pixels = (row * 255).clamp(0, 255).to(torch.uint8).squeeze(2).numpy()
    Image.fromarray(pixels).save(path)
