"""What the jobs of this folder share: the one argument, and the last line they print."""

from __future__ import annotations

import argparse
import hashlib

import torch


def arguments(**more: float) -> argparse.Namespace:
    """Returns the command line: `--steps`, and each of `more` with its default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    torch.manual_seed(0)
    return parser.parse_args()


def epochs(loader, steps):
    """Yields batches of one epoch after the other until so many were taken."""
    taken = 0
    while True:
        for batch in loader:
            yield batch
            taken += 1
            if taken == steps:
                return


def print_weights(model: torch.nn.Module, loss: torch.Tensor) -> None:
    """Prints a fingerprint of the weights, bit for bit, and the last loss."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().contiguous().numpy().tobytes())
    print("weights", digest.hexdigest()[:16], "loss", loss.item())
