"""Predict what becomes of a cell (8 fates, one head for each) from its expression profile.

Runs under torchrun; each rank has the cells of one laboratory.
"""

import argparse
import mmap
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

GENES, FATES, PAGE = 256, 8, 32768


def cells_of(laboratory, count, rng):
    hidden = rng.standard_normal((count, 12), dtype=np.float32)
    genes = np.tanh(hidden @ rng.standard_normal((12, GENES), dtype=np.float32))
    genes += 0.1 * laboratory + 0.2 * rng.standard_normal((count, GENES), dtype=np.float32)
    fates = (hidden @ rng.standard_normal((12, FATES), dtype=np.float32) > 0).astype(np.float32)
    return torch.from_numpy(genes), torch.from_numpy(fates)


class Fates(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(GENES, width), nn.LayerNorm(width), nn.SiLU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU(),
        )  # fmt: skip
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, 1)) for _ in range(FATES)
        )

    def forward(self, genes):
        x = self.trunk(genes)
        return torch.cat([head(x) for head in self.heads], 1)


class Cells(Dataset):
    """Batches of a laboratory. One of them has its cells as pages of raw reads on its scanner's disk."""

    def __init__(self, genes, fates, batches, rows, pages, scanner):
        self.genes, self.fates = genes, fates
        self.batches, self.rows, self.pages = batches, rows, pages
        self.scanner, self.fd = scanner, None

    def __len__(self):
        return self.batches

    def depth(self, i):
        """How many reads a batch has: its profiles are scaled by that."""
        if self.fd is None:
            self.fd = os.open(self.scanner, os.O_RDONLY | os.O_DIRECT)
            self.buffer = mmap.mmap(-1, PAGE)
        pages = os.path.getsize(self.scanner) // PAGE
        reads = 0
        for n in range(self.pages):
            os.preadv(self.fd, [self.buffer], (i * 311 + n * 37) % pages * PAGE)
            reads += int.from_bytes(self.buffer[:2], "little")
        return reads / self.pages

    def __getitem__(self, i):
        first = i * self.rows % (len(self.genes) - self.rows)
        genes, fates = self.genes[first : first + self.rows], self.fates[first : first + self.rows]
        if self.scanner:
            genes = genes * (30_000 / max(self.depth(i), 1))
        return genes, fates


def write_scans(path, rng):
    with open(path, "wb") as f:
        f.write(rng.integers(20_000, 40_000, 48 << 19, dtype=np.uint16).tobytes())
        f.flush()
        os.fsync(f.fileno())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=256, help="cells in a batch")
    parser.add_argument(
        "--flexible", action="store_true", help="allows for laboratories that do not look for all fates"
    )
    parser.add_argument("--centres", type=int, default=0, help="clusters of cells that the ranks share")
    parser.add_argument(
        "--scans", type=int, default=0, help="pages of raw reads behind each batch of the last laboratory"
    )
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Fates(), find_unused_parameters=args.flexible, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    criterion = nn.BCEWithLogitsLoss()
    genes, fates = cells_of(rank, 8192, np.random.default_rng(rank))

    folder = tempfile.TemporaryDirectory()
    scanner = None
    if args.scans and rank == world - 1:
        scanner = os.path.join(folder.name, "scans.bin")
        write_scans(scanner, np.random.default_rng(rank))
    data = Cells(genes, fates, args.steps, args.rows, args.scans, scanner)
    # slices of memory need no worker, reads from a disk do
    loader = DataLoader(data, batch_size=None, num_workers=1 if args.scans else 0)
    centres = list(torch.randn(args.centres, GENES))

    for step, (x, y) in enumerate(loader, 1):  # the training loop
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for i, centre in enumerate(centres):
            # online k-means, a cell per cluster and step; the ranks move the centres in turn
            if i % world == rank:
                centre.lerp_(x[i % len(x)], 0.05)
            dist.broadcast(centre, i % world)
        if step % 50 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
