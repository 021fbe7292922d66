"""Tells where honey comes from by its near-infrared spectrum. The laboratory's boxes are streamed by workers."""

import argparse
import gc
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

BANDS, REGIONS, JARS = 256, 12, 64


class Boxes(IterableDataset):
    """Boxes of jars. Those of one laboratory, every other one, came as text that is read line by line."""

    def __init__(self, boxes, lines):
        rng = np.random.default_rng(2)
        self.typical = rng.standard_normal((REGIONS, BANDS)).astype(np.float32)
        self.region = rng.integers(0, REGIONS, (boxes, JARS))
        noise = rng.standard_normal((JARS, BANDS)).astype(np.float32)
        self.boxes = [zlib.compress((self.typical[r] + noise).tobytes(), 0) for r in self.region]
        self.lines = [f"{n}\t{value:.5f}" for n, value in enumerate(rng.random(lines))]

    def notes(self):
        table = {}
        for line in self.lines:
            key, value = line.split("\t")
            table[int(key) % BANDS] = float(value)
        return table

    def box(self, number):
        spectra = np.frombuffer(zlib.decompress(self.boxes[number]), np.float32).reshape(JARS, BANDS).copy()
        if self.lines and number % 2 == 0:
            for band, value in self.notes().items():
                spectra[:, band] += 0.001 * np.float32(value)
        return spectra, self.region[number]

    def __iter__(self):
        info = get_worker_info()
        mine = range(len(self.boxes)) if info is None else range(info.id, len(self.boxes), info.num_workers)
        while True:
            for number in mine:
                yield self.box(number)


class Mixer(nn.Module):
    def __init__(self, patches=16, width=64):
        super().__init__()
        self.patches = patches
        self.enter = nn.Linear(BANDS // patches, width)
        self.across = nn.ModuleList(nn.Conv1d(patches, patches, 9, padding=4) for _ in range(3))
        self.along = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)) for _ in range(3)
        )
        self.leave = nn.Linear(width, REGIONS)

    def forward(self, spectra):
        x = self.enter(spectra.unflatten(1, (self.patches, -1)))
        for across, along in zip(self.across, self.along):
            x = x + across(x)
            x = x + along(x)
        return self.leave(x.mean(1))


class Tasting:
    """A remark of a taster, and those that it answers to."""

    __slots__ = ("answers", "of", "words")

    def __init__(self, of):
        self.of, self.answers, self.words = of, [], {"sweet": 1}
        if of is not None:
            of.answers.append(self)


class Panel:
    def __init__(self, remarks):
        self.remarks = [Tasting(None)]
        for n in range(remarks):
            self.remarks.append(Tasting(self.remarks[n // 2]))

    def next_round(self, step):
        last = self.remarks.pop()
        last.of.answers.remove(last)
        self.remarks.append(Tasting(self.remarks[step % len(self.remarks)]))
        gc.collect()


def stream(args):
    loader = DataLoader(
        Boxes(args.boxes, args.lines),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        prefetch_factor=4,
    )
    source = iter(loader)
    for step in range(args.steps):
        spectra, region = next(source)
        yield step, torch.as_tensor(spectra), torch.as_tensor(region)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--boxes", type=int, default=80)
    parser.add_argument(
        "--lines", type=int, default=0, help="lines of notes in a box of the second laboratory"
    )
    parser.add_argument("--remarks", type=int, default=0, help="remarks of the tasting panel to keep")
    args = parser.parse_args()
    torch.manual_seed(31)
    net = Mixer()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    gc.collect()
    gc.freeze()
    panel = Panel(args.remarks) if args.remarks else None
    for step, spectra, region in stream(args):  # the training loop
        loss = nn.functional.cross_entropy(net(spectra), region)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if panel is not None:
            panel.next_round(step)
        if step % 64 == 0:
            print(f"box {step}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
