"""Tells the flight calls of migrating birds apart, cut from one long recording that lies on disk."""

import argparse
import copy
import gc
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

FRAMES, BANDS, SPECIES, BATCH = 64, 40, 12, 32


def record(folder, frames=120_000):
    """A night on tape: noise, and in it the calls, each a rising or falling sweep."""
    rng = np.random.default_rng(8)
    tape = np.memmap(folder / "night.f32", dtype=np.float32, mode="w+", shape=(frames, BANDS))
    tape[:] = rng.standard_normal((frames, BANDS), dtype=np.float32)
    starts = np.arange(0, frames - FRAMES, FRAMES)
    species = rng.integers(0, SPECIES, len(starts))
    for start, kind in zip(starts, species, strict=False):
        band = 3 * kind + 2
        tape[start + 20 : start + 20 + 2 * (kind + 1), band : band + 3] += 2.5
    tape.flush()
    night = np.memmap(folder / "night.f32", dtype=np.float32, mode="r", shape=(frames, BANDS))
    return night, starts, species


def cut(tape, starts, picks):
    clips = np.empty((len(picks), 1, FRAMES, BANDS), dtype=np.float32)
    for slot, start in enumerate(starts[picks].tolist()):
        clips[slot, 0] = tape[start : start + FRAMES]
    return torch.from_numpy(clips)


def convolution(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class CallNet(nn.Sequential):
    def __init__(self):
        middle = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        top = nn.Sequential(nn.AdaptiveAvgPool2d((4, 5)), nn.Flatten(), nn.Linear(64 * 20, SPECIES))
        super().__init__(convolution(1, 32), convolution(32, 64), middle, top)


def run(folder, steps):
    rng = np.random.default_rng(9)
    tape, starts, species = record(folder)
    species = torch.from_numpy(species)
    model = CallNet()
    smooth = copy.deepcopy(model).requires_grad_(False)
    pairs = list(smooth.parameters()), list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    recent, best, kept = deque(maxlen=20), float("inf"), None
    gc.collect()
    gc.freeze()
    step = 0
    while True:  # the training loop
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 30)
        picks = rng.integers(0, len(starts), BATCH)
        clips, kinds = cut(tape, starts, picks), species[torch.from_numpy(picks)]

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(clips), kinds, label_smoothing=0.05)  # noqa: B023
            loss.backward()
            return loss

        recent.append(optimizer.step(closure).item())
        with torch.no_grad():
            torch._foreach_lerp_(*pairs, 0.05)
        step += 1
        if step % 50 == 0:
            average = sum(recent) / len(recent)
            if average < best:
                best, kept = average, copy.deepcopy(smooth.state_dict())
            print(f"{step:5d}  loss {average:.3f}  best {best:.3f}", flush=True)
        if step >= steps:
            break
    return kept


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(8)
    with TemporaryDirectory() as folder:
        run(Path(folder), steps)


if __name__ == "__main__":
    main()
