"""Finds the modification of a peptide in its fragment spectrum, streamed from a machine's .mgf.gz runs.

A run is one gzip stream, so whoever wants a part of it unpacks all of it: with several workers, each reads
everything and keeps its own spectra.
"""

import argparse
import csv
import gzip
import io
import itertools
import math
import os
import tempfile
import time
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

PER_RUN = 320
KEPT = 64
KINDS = 10
RESIDUES = dict(
    zip("GASPVTCLNDQKEMHFRYW", np.linspace(57.02, 186.08, 19).round(3).tolist(), strict=True),
)


# ---------------------------------------------------------------- the instrument


def write_run(path, dice, scans, peaks):
    """One run of the instrument in Mascot's generic format."""
    line = "%.3f %.1f\n" * peaks
    with gzip.open(path, "wt", compresslevel=1) as out:
        for scan in scans:
            kind = int(dice.integers(KINDS))
            table = np.empty((peaks, 2))
            table[:, 0] = np.sort(dice.uniform(100, 1500, peaks))
            table[:, 1] = dice.exponential(100, peaks)
            marker = int(dice.integers(peaks - 8))
            table[marker : marker + 8, 1] += 300 + 120 * kind
            out.write(f"BEGIN IONS\nTITLE={scan}\nPEPMASS={dice.uniform(400, 1800):.4f}\nKIND={kind}\n")
            out.write(line % tuple(table.ravel().tolist()))
            out.write("END IONS\n")


def write_runs(folder, runs, peaks, withdrawn):
    dice = np.random.default_rng(29)
    paths = []
    for number in range(runs):
        paths.append(os.path.join(folder, f"run{number:02}.mgf.gz"))
        write_run(paths[-1], dice, range(number * PER_RUN, (number + 1) * PER_RUN), peaks)
    if withdrawn:
        with open(os.path.join(folder, "withdrawn.csv"), "w") as out:
            out.write("scan,why,since\n")
            out.writelines(f"{10**6 + number},lock mass,2024-05-17\n" for number in range(withdrawn))
    return paths


# ---------------------------------------------------------------- reading


class Mounted(io.FileIO):
    """A file of the institute's archive, which answers each request after a while."""

    answer_s = 0.0

    def read(self, size=-1):
        if self.answer_s:
            time.sleep(self.answer_s)
        return super().read(size)


def parse(lines):
    """Yields scan, mass, kind and peaks of each spectrum."""
    facts, peaks = {}, []
    for line in lines:
        if line[0].isdigit():
            position, height = line.split()
            peaks.append((float(position), float(height)))
        elif line.startswith("END"):
            yield int(facts["TITLE"]), float(facts["PEPMASS"]), int(facts["KIND"]), peaks
            facts, peaks = {}, []
        elif "=" in line:
            key, _, value = line.rstrip().partition("=")
            facts[key] = value


def strongest(peaks):
    table = np.array(peaks, dtype=np.float32)
    rows = np.sort(np.argpartition(table[:, 1], -KEPT)[-KEPT:])
    table = table[rows]
    table[:, 1] = np.sqrt(table[:, 1] / table[:, 1].max())
    return table


def known_masses(count):
    """Masses of the peptides that were found before."""
    dice, letters = np.random.default_rng(4), np.array(list(RESIDUES))
    words = letters[dice.integers(len(letters), size=(count, 10))]
    return np.sort([18.011 + sum(RESIDUES[letter] for letter in word) for word in words.tolist()])


def withdrawn_scans(folder):
    path = os.path.join(folder, "withdrawn.csv")
    if not os.path.exists(path):
        return frozenset()
    with open(path, newline="") as file:  # the core facility may have added some
        return frozenset(int(row["scan"]) for row in csv.DictReader(file) if row["since"] < "2025-01-01")


class Runs(IterableDataset):
    def __init__(self, paths, library, answer_s, epoch):
        self.paths, self.library, self.answer_s, self.epoch = paths, library, answer_s, epoch
        self.masses = None

    def everything(self):
        order = np.random.default_rng(self.epoch).permutation(len(self.paths))
        for run in order:
            with Mounted(self.paths[run]) as raw, gzip.open(raw, "rt", encoding="ascii") as lines:
                raw.answer_s = self.answer_s
                yield from parse(lines)

    def __iter__(self):
        info = get_worker_info()
        mine, readers = (info.id, info.num_workers) if info else (0, 1)
        if self.masses is None and self.library:
            self.masses = known_masses(self.library)
        self.epoch += 1
        gone = withdrawn_scans(os.path.dirname(self.paths[0]))
        for scan, mass, kind, peaks in itertools.islice(self.everything(), mine, None, readers):
            if scan in gone:
                continue
            near = 0.0
            if self.masses is not None:
                place = min(np.searchsorted(self.masses, mass), self.library - 1)
                near = math.exp(-abs(self.masses[place] - mass))
            yield strongest(peaks), near, kind


def best_shift(tables, shifts):
    """The shift (in dalton) at which the peaks of a batch lie closest together: the lowest entropy."""
    positions, heights = tables[..., 0].ravel(), tables[..., 1].ravel()
    best, least = 0.0, math.inf
    for shift in np.linspace(-0.5, 0.5, shifts):
        filled = np.bincount(((positions + shift) * 4).astype(np.int64), heights, minlength=6400)
        share = filled[filled > 0] / filled.sum()
        disorder = -(share * np.log(share)).sum()
        if disorder < least:
            best, least = shift, disorder
    return best


def together(spectra, shifts):
    tables, near, kinds = zip(*spectra, strict=True)
    tables = np.stack(tables)
    if shifts:
        tables[..., 0] += best_shift(tables, shifts)
    return torch.from_numpy(tables), torch.tensor(near, dtype=torch.float32), torch.tensor(kinds)


def make_loader(paths, args, epoch=0):
    data = Runs(paths, args.library, args.answer / 1000, epoch)
    return DataLoader(
        data,
        batch_size=args.batch,
        num_workers=args.workers,
        collate_fn=partial(together, shifts=args.shifts),
        drop_last=True,
        persistent_workers=args.workers > 0,
    )


# ---------------------------------------------------------------- the network


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class PeakNet(nn.Module):
    def __init__(self, width=64, depth=2, heads=4):
        super().__init__()
        self.register_buffer("waves", 2 * math.pi / torch.logspace(-1, 3, width // 2))
        self.lift = nn.Linear(width + 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, KINDS)

    def forward(self, tables, near):
        angles = tables[..., :1] * self.waves
        known = near[:, None, None].expand(-1, tables.shape[1], 1)
        x = self.lift(torch.cat([angles.sin(), angles.cos(), tables[..., 1:], known], dim=2))
        return self.head(self.blocks(x).mean(1))


def spread_of_accuracy(logits, kinds, draws):
    """The standard error of the batch's accuracy, by the bootstrap."""
    right = (logits.argmax(1) == kinds).float()
    return torch.stack([right[torch.randint(len(right), (len(right),))].mean() for _ in range(draws)]).std()


def main(args):
    torch.manual_seed(8)
    torch.set_num_threads(1)
    net = PeakNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_runs(folder, args.runs, args.peaks, args.withdrawn)
        loader = make_loader(paths, args)
        steps, spread = 0, None
        for epoch in itertools.count():
            if steps == args.steps:
                break
            if args.fresh and epoch:
                loader = make_loader(paths, args, epoch)  # the order of the runs goes by the epoch
            for tables, near, kinds in itertools.islice(loader, args.steps - steps):  # the training loop
                logits = net(tables, near)
                loss = F.cross_entropy(logits, kinds)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if args.draws:
                    spread = spread_of_accuracy(logits.detach(), kinds, args.draws)
                steps += 1
    print(f"{steps} steps, loss {loss.item():.3f}", "" if spread is None else f"+- {spread.item():.3f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=211)
    cli.add_argument("--batch", type=int, default=32)
    cli.add_argument("--workers", type=int, default=1)
    cli.add_argument("--runs", type=int, default=8, help="files; each has 320 spectra")
    cli.add_argument("--peaks", type=int, default=200, help="peaks of a spectrum, of which 64 are kept")
    cli.add_argument("--answer", type=float, default=0, help="milliseconds in which the archive answers")
    cli.add_argument("--withdrawn", type=int, default=0, help="entries of the list of withdrawn scans")
    cli.add_argument("--library", type=int, default=0, help="peptides whose masses are known")
    cli.add_argument("--fresh", action="store_true", help="a loader for each epoch")
    cli.add_argument("--shifts", type=int, default=0, help="calibrations to try with each batch")
    cli.add_argument("--draws", type=int, default=0, help="draws for the error of the accuracy")
    main(cli.parse_args())
