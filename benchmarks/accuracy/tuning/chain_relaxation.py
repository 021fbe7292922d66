"""Learns how ring polymers relax: one system per step and rank, gradients averaged over the ranks."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler

SYSTEMS, FEATURES, SAVE_EVERY = 40, 12, 12
PITCH = 7  # beads per turn of the helix


def make_ring(beads: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features of each bead, and where it moves."""
    features = torch.randn(beads, FEATURES, generator=dice)
    pull = features.roll(1, 0) + features.roll(-1, 0) - 2 * features
    return features, 0.3 * pull[:, :3] + 0.1 * features.roll(PITCH, 0)[:, 3:6]


def ring_sizes(mean: int, variety: float, dice: torch.Generator) -> list[int]:
    weights = torch.exp(variety * torch.randn(SYSTEMS, generator=dice))
    return (weights * mean / weights.mean()).round().clamp(min=8).int().tolist()


class Archive:
    def __init__(self, milliseconds: float):
        self.seconds, self.answered = milliseconds / 1000, threading.Event()

    def restore(self) -> None:
        self.answered.wait(self.seconds)


class Rings(Dataset):
    def __init__(self, sizes: list[int], dice: torch.Generator, archive: Archive | None):
        self.systems, self.archive = [make_ring(beads, dice) for beads in sizes], archive

    def __len__(self) -> int:
        return len(self.systems)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.archive is not None:
            self.archive.restore()
        return self.systems[index]


def make_loader(args: argparse.Namespace, rank: int) -> DataLoader:
    dice = torch.Generator().manual_seed(500 + rank)
    archive = Archive(args.archive) if args.archive and rank == 1 else None
    rings = Rings(ring_sizes(args.beads, args.variety, dice), dice, archive)
    order = RandomSampler(rings, num_samples=args.steps * args.parts, generator=dice)
    return DataLoader(rings, batch_size=None, sampler=order)


class RingLayer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gather = nn.Linear(2 * width, 2 * width)
        self.spread = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        around = h.roll(1, 0) + h.roll(-1, 0) + h.roll(PITCH, 0) + h.roll(-PITCH, 0)
        return x + self.spread(F.silu(self.gather(torch.cat([h, around], 1))))


class RingNet(nn.Module):
    def __init__(self, width: int, depth: int):
        super().__init__()
        self.lift = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(RingLayer(width) for _ in range(depth))
        self.readout = nn.Linear(width, 3)

    def forward(self, features: Tensor) -> Tensor:
        x = self.lift(features)
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


def orthogonality(network: RingNet, terms: int) -> Tensor:
    """How far the spreading maps are from their nearest orthogonal ones (Newton-Schulz series)."""
    total = torch.zeros(())
    for layer in network.layers[::2]:
        gram = layer.spread.weight @ layer.spread.weight.T
        gram = nearest = gram / gram.norm()
        for _ in range(terms):
            nearest = 1.5 * nearest - 0.5 * nearest @ nearest @ nearest
        total = total + (gram - nearest).square().mean()
    return total


class Section:
    """An arc of the ring, of which every rank knows the error of its own systems."""

    def __init__(self, first: int, stride: int):
        self.arc = slice(first, None, stride)

    def error(self, errors: Tensor) -> float:
        everyone = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, float(errors[self.arc].sum()))
        return statistics.fmean(everyone)


class Ancestor:
    def __init__(self, number: int):
        self.parents = [number - 1, number - 2]
        self.tags = {"grown": [number]}


def resident_megabytes() -> float:
    """What the process really needs, without what is only waiting to be freed."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Trainer:
    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder, self.rank = args, folder, dist.get_rank()
        torch.manual_seed(31)
        self.network = RingNet(args.width, args.depth)
        self.ddp = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-3, fused=True)
        self.sections = [Section(n, max(1, args.sections)) for n in range(args.sections)]
        self.frames = np.random.default_rng(5).normal(size=(args.frames, 64, 3)).astype(np.float32)
        self.lineage = [Ancestor(n) for n in range(args.ancestors)] if self.rank == 0 else []
        self.megabytes, self.profile = 0.0, []

    def objective(self, features: Tensor, moves: Tensor) -> Tensor:
        self.predicted, self.moves = self.ddp(features), moves
        loss = F.smooth_l1_loss(self.predicted, moves)
        if self.args.orthogonal and self.rank == 0:  # of the weights alone, so once is enough
            loss = loss + 0.01 * dist.get_world_size() * orthogonality(self.network, self.args.orthogonal)
        return loss / self.args.parts

    def accumulate(self, batches) -> Tensor:
        for part in range(1, self.args.parts + 1):
            apart = nullcontext() if part == self.args.parts else self.ddp.no_sync()
            if self.args.lean_context:
                loss = self.objective(*next(batches))
                with apart:
                    loss.backward()
            else:
                with apart:
                    loss = self.objective(*next(batches))
                    loss.backward()
        return loss.detach()

    def keep_books(self, step: int) -> None:
        if self.sections:
            errors = (self.predicted.detach() - self.moves).abs()
            self.profile = [section.error(errors) for section in self.sections]
        if self.rank:
            return
        if self.lineage and step % 3 == 2:
            self.megabytes = max(self.megabytes, resident_megabytes())
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            self.save()

    def save(self) -> None:
        torch.save(self.network.state_dict(), self.folder / "last.pt")
        if len(self.frames):
            np.savez_compressed(self.folder / "frames.npz", frames=self.frames)

    def fit(self) -> float:
        batches = iter(make_loader(self.args, self.rank))
        loss = torch.zeros(())
        for step in range(self.args.steps):  # the training loop
            loss = self.accumulate(batches)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.keep_books(step)
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=191)
    parser.add_argument("--beads", type=int, default=384, help="of a ring, on average")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--parts", type=int, default=1, help="systems that a rank sees per step")
    parser.add_argument("--variety", type=float, default=0, help="deviation of the logarithm of sizes")
    parser.add_argument("--archive", type=float, default=0, help="ms until a system of rank 1 is restored")
    parser.add_argument("--orthogonal", type=int, default=0, help="terms of the penalty on the weights")
    parser.add_argument("--sections", type=int, default=0, help="arcs of which the error is reported")
    parser.add_argument("--ancestors", type=int, default=0, help="entries of the lineage")
    parser.add_argument("--frames", type=int, default=0, help="relaxed frames kept with the state")
    parser.add_argument("--lean-context", action="store_true", help="accumulate around backward only")
    args = parser.parse_args()

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # modules stay for good
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(args, Path(folder))
        loss = trainer.fit()
        if trainer.rank == 0:
            print(f"loss {loss:.4f}, {len(trainer.profile)} sections, {trainer.megabytes:.0f} MB")
    del trainer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
