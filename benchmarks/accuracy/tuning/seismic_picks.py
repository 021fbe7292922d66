"""Pick the arrival of P waves in seismograms with a small residual network.

python seismic_picks.py --steps 1000
python seismic_picks.py --stations 40     # stacked records from the archive volume
"""

import argparse
import atexit
import collections
import mmap
import os
import shutil
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

RECORDS, SAMPLES, BLOCK = 1024, 128, 65536


def make_records(seed):
    """Noise, and from some sample on a decaying oscillation."""
    rng = np.random.default_rng(seed)
    onset = rng.integers(16, SAMPLES - 16, RECORDS)
    t = np.arange(SAMPLES)[None, :] - onset[:, None]
    wave = np.exp(-np.clip(t, 0, None) / 20) * np.sin(0.7 * t) * (t >= 0)
    records = 0.3 * rng.standard_normal((RECORDS, SAMPLES)) + wave
    return records.astype(np.float32), onset.astype(np.int64)


class Archive:
    """A file with one block of 64 KiB per record, at the rate of the digitizer."""

    def __init__(self, folder, records):
        self.path = os.path.join(folder, "archive.bin")
        rate = BLOCK // 4 // SAMPLES
        with open(self.path, "wb") as f:
            for part in np.array_split(records, 16):
                f.write(np.repeat(part, rate, axis=1).tobytes())
            f.flush()
            os.fsync(f.fileno())
        self.rate = rate
        self.fd = None

    def read(self, number):
        if self.fd is None:
            # the volume is shared by the group: our reads must not push out everybody's page cache
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            self.page = mmap.mmap(-1, BLOCK)
        os.preadv(self.fd, [self.page], number * BLOCK)
        return np.frombuffer(self.page, np.float32)[:: self.rate]


class Seismograms(Dataset):
    def __init__(self, records, onset, length, stations, archive):
        self.records, self.onset, self.length = records, onset, length
        self.stations, self.archive = stations, archive

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        i = (i * 389) % RECORDS
        x = self.records[i]
        if self.stations:
            stack = np.zeros(SAMPLES, np.float32)
            for n in range(self.stations):
                stack += self.archive.read((i + 101 * n) % RECORDS)
            x = x + 0.1 / self.stations * stack
        return x, self.onset[i]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(width, width, 5, padding=2, bias=False),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv1d(width, width, 5, padding=2, bias=False),
            nn.GroupNorm(4, width),
        )

    def forward(self, x):
        return x + self.body(x)


class Picker(nn.Module):
    def __init__(self, width=32, depth=8, thrifty=0):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 7, padding=3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Conv1d(width, 1, 1)
        self.thrifty = thrifty

    def forward(self, x):
        x = self.stem(x[:, None])
        for i, block in enumerate(self.blocks):
            if i < self.thrifty:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)[:, 0]


def weights_of(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def save(folder, step, model, optimizer, past):
    """The nodes may be taken from us at any time: what is saved must be on the disk."""
    path = os.path.join(folder, "state.pt")
    with open(path + ".new", "wb") as f:
        torch.save(
            {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "past": past},
            f,
        )
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".new", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--stations", type=int, default=0, help="add a stack of so many stations, from the archive"
    )
    parser.add_argument("--thrifty", type=int, default=0, help="blocks that keep no activations, at most 8")
    parser.add_argument(
        "--past", type=int, default=0, help="save the state, with weights of so many steps to go back to"
    )
    args = parser.parse_args()

    torch.manual_seed(3)
    folder = tempfile.mkdtemp(prefix="picks")
    atexit.register(shutil.rmtree, folder, True)
    records, onset = make_records(3)
    archive = Archive(folder, records) if args.stations else None
    data = Seismograms(records, onset, args.steps * args.batch, args.stations, archive)
    loader = DataLoader(data, args.batch, num_workers=2, prefetch_factor=2)

    model = Picker(thrifty=args.thrifty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    criterion = nn.CrossEntropyLoss()
    past = collections.deque((weights_of(model) for _ in range(args.past)), maxlen=args.past)
    for step, (x, y) in enumerate(loader, 1):  # the training loop
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.past and step % 8 == 0:
            past.append(weights_of(model))
            save(folder, step, model, optimizer, list(past))
        if step % 50 == 0:
            print(f"{step:5d} {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
