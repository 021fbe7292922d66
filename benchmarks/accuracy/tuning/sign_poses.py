"""Sign language: which of 60 signs is it, by the joints of two hands in 12 frames?

The clips come in packs of 64. A batch is mixed from a window of packs that moves on: good enough as a shuffle,
and a pack has to be unpacked only when the window gets there.
"""

from __future__ import annotations

import argparse
import bz2
import functools
import json
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FRAMES, JOINTS, SIGNS = 12, 42, 60
PACK, WINDOW = 64, 16


def make_packs(count: int) -> list[tuple[bytes, np.ndarray]]:
    rng = np.random.default_rng(33)
    gestures = rng.normal(0, 300, (SIGNS, FRAMES, JOINTS)).cumsum(1)
    packs = []
    for _ in range(count):
        signs = rng.integers(0, SIGNS, PACK)
        clips = gestures[signs] + rng.normal(0, 60, (PACK, FRAMES, JOINTS))
        packs.append((bz2.compress(clips.astype(np.int16).tobytes()), signs))
    return packs


class Clips(Dataset):
    def __init__(self, packs):
        self.packs = packs
        self.unpack = functools.lru_cache(maxsize=WINDOW + 4)(self._unpack)

    def _unpack(self, number: int) -> np.ndarray:
        raw = np.frombuffer(bz2.decompress(self.packs[number][0]), np.int16)
        clips = raw.reshape(PACK, FRAMES, JOINTS).astype(np.float32) / 1000
        speed = np.diff(clips, axis=1, prepend=clips[:, :1])
        return np.concatenate([clips - clips.mean(1, keepdims=True), speed], 2)

    def __getitems__(self, places: list[tuple[int, int]]):
        clips = np.stack([self.unpack(pack)[row] for pack, row in places])
        signs = np.array([self.packs[pack][1][row] for pack, row in places])
        return torch.from_numpy(clips).transpose(1, 2), torch.from_numpy(signs)


def moving_window(packs: int, steps: int, size: int):
    """The places of the clips in each batch."""
    rng = np.random.default_rng(34)
    for step in range(steps):
        first = step * size // PACK
        chosen = (first + rng.integers(0, WINDOW, size)) % packs
        yield list(zip(chosen.tolist(), rng.integers(0, PACK, size).tolist()))


class Stage(nn.Sequential):
    def __init__(self, given: int, width: int):
        super().__init__(
            nn.Conv1d(given, width, 3, padding=1, bias=False), nn.BatchNorm1d(width), nn.ReLU(inplace=True)
        )


def network(width: int) -> nn.Sequential:
    return nn.Sequential(
        Stage(2 * JOINTS, width),
        Stage(width, width),
        Stage(width, width),
        nn.MaxPool1d(2),
        Stage(width, width),
        Stage(width, width),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(width, SIGNS),
    )


def train(args, diary):
    torch.manual_seed(33)
    packs = make_packs(40)
    batches = list(moving_window(len(packs), args.steps, args.clips))
    loader = DataLoader(
        Clips(packs),
        batch_sampler=batches,
        num_workers=args.readers,
        collate_fn=lambda batch: batch,
        multiprocessing_context="fork",
    )
    net = network(args.width)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for step, (clips, signs) in enumerate(loader):  # the training loop
        scores = net(clips)
        loss = nn.functional.cross_entropy(scores, signs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.diary:
            weights = net[1][0].weight.detach().flatten()[: args.diary]
            diary.write(json.dumps({"step": step, "weights": weights.tolist()}) + "\n")
            diary.flush()
        if step % 50 == 49:
            right = (scores.argmax(1) == signs).float().mean().item()
            print(f"{step + 1:4d}  {loss.item():.3f}  {right:.0%}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--clips", type=int, default=32, help="clips in a batch")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--readers", type=int, default=1, help="who unpack the clips")
    parser.add_argument(
        "--diary", type=int, default=0, help="weights of the second stage to keep for the plots"
    )
    args = parser.parse_args()
    with tempfile.TemporaryFile("w") as diary:
        train(args, diary)


if __name__ == "__main__":
    main()
