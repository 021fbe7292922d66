"""Predicts from 512 letters of DNA in which cell types the chromatin is open, data-parallel."""

import argparse
import zlib
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WINDOW, TRACKS, CONTIGS, BINS = 512, 164, 4, 16


@dataclass(frozen=True)
class Config:
    steps: int
    rows: int
    accumulate: int
    dense: int
    archived_kb: int
    watched: int
    spectrum_rounds: int
    forward_outside: bool
    channels: int = 48
    windows: int = 1024
    rate: float = 1e-3


def configure():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="windows per micro-batch and rank")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--dense", type=int, default=512, help="width of the hidden dense layer")
    parser.add_argument("--archived-kb", type=int, default=0, help="kilobases of the last rank's contigs")
    parser.add_argument("--watched", type=int, default=0, help="tracks whose error and hits are shared")
    parser.add_argument("--spectrum-rounds", type=int, default=0, help="of the dense layer's penalty")
    parser.add_argument("--forward-outside", action="store_true", help="accumulate around backward")
    return Config(**vars(parser.parse_args()))


class Windows(Dataset):
    """Windows of an assembly, and the cell types in which each is open."""

    def __init__(self, config, rank, archived):
        rng = np.random.default_rng(700 + rank)
        length = config.archived_kb * 1000 if archived else 60_000
        contigs = rng.integers(0, 4, (CONTIGS, length), dtype=np.uint8)
        self.starts = rng.integers(0, length - WINDOW, config.windows)
        cut = [contigs[n % CONTIGS, start : start + WINDOW] for n, start in enumerate(self.starts)]
        letters = np.stack(cut)
        self.letters = torch.from_numpy(letters)
        self.peaks = torch.from_numpy(self.call_peaks(letters))
        self.archive = [zlib.compress(contig.tobytes(), 1) for contig in contigs] if archived else []

    @staticmethod
    def call_peaks(letters):
        wide = letters.astype(np.int64)
        words = wide[:, :-3] * 64 + wide[:, 1:-2] * 16 + wide[:, 2:-1] * 4 + wide[:, 3:]
        words += 256 * np.arange(len(letters))[:, None]
        counts = np.bincount(words.ravel(), minlength=256 * len(letters)).reshape(len(letters), 256)
        affinity = np.random.default_rng(1).normal(size=(256, TRACKS))
        scores = (counts - counts.mean(0)) @ affinity
        return (scores > np.quantile(scores, 0.8, axis=0)).astype(np.float32)

    def __len__(self):
        return len(self.peaks)

    def __getitem__(self, index):
        if not self.archive:
            return self.letters[index], self.peaks[index]
        contig = np.frombuffer(zlib.decompress(self.archive[index % CONTIGS]), np.uint8)
        start = int(self.starts[index])
        return torch.from_numpy(contig[start : start + WINDOW].copy()), self.peaks[index]


class DilatedBlock(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.conv = nn.Conv1d(channels, channels, 5, padding=2 * dilation, dilation=dilation, bias=False)

    def forward(self, x):
        return x + self.conv(F.gelu(self.norm(x)))


class Accessibility(nn.Module):
    def __init__(self, channels, dense):
        super().__init__()
        self.stem = nn.Conv1d(4, channels, 15, stride=2, padding=7, bias=False)
        self.blocks = nn.Sequential(*[DilatedBlock(channels, dilation) for dilation in (1, 2, 4)])
        self.norm = nn.GroupNorm(8, channels)
        self.dense = nn.Linear(channels * BINS, dense)
        self.tracks = nn.Linear(dense, TRACKS)

    def forward(self, letters):
        x = F.one_hot(letters.long(), 4).transpose(1, 2).float().contiguous()
        x = F.gelu(self.norm(self.blocks(self.stem(x))))
        x = F.adaptive_avg_pool1d(x, BINS).flatten(1)
        return self.tracks(F.gelu(self.dense(x)))


def leading_singular_values(weight, basis, rounds):
    with torch.no_grad():
        for _ in range(rounds):
            basis = torch.linalg.qr(weight.T @ (weight @ basis)).Q
    return torch.linalg.vector_norm(weight @ basis, dim=0)


def share_board(board, logits, peaks, watched):
    errors = F.binary_cross_entropy_with_logits(logits, peaks, reduction="none").mean(0)
    hits = ((logits > 0) == (peaks > 0.5)).float().mean(0)
    for number in range(watched):
        track = number % TRACKS
        for kind, values in (("error", errors), ("hits", hits)):
            value = values[track].clone()
            dist.all_reduce(value)
            board[kind, track] = value / dist.get_world_size()


def endless(loader):
    while True:
        yield from loader


def train(config):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11 + rank)
    data = Windows(config, rank, archived=config.archived_kb > 0 and rank == world - 1)
    feed = endless(DataLoader(data, batch_size=config.rows, shuffle=True, drop_last=True))
    model = DistributedDataParallel(Accessibility(config.channels, config.dense), broadcast_buffers=False)
    adam = torch.optim.AdamW(model.parameters(), lr=config.rate, fused=True)
    basis = torch.randn(config.channels * BINS, 32)
    board = {}

    def objective(letters, peaks, last):
        logits = model(letters)
        loss = F.binary_cross_entropy_with_logits(logits, peaks) / config.accumulate
        if config.spectrum_rounds and last and rank == 0:
            # times the ranks, as the gradients are averaged
            leading = leading_singular_values(model.module.dense.weight, basis, config.spectrum_rounds)
            loss = loss + 1e-5 * world * leading.square().sum()
        return logits.detach(), loss

    for step in range(1, config.steps + 1):  # the training loop
        for micro in range(1, config.accumulate + 1):
            letters, peaks = next(feed)
            last = micro == config.accumulate
            scope = nullcontext() if last else model.no_sync()
            if config.forward_outside:
                logits, loss = objective(letters, peaks, last)
                with scope:
                    loss.backward()
            else:
                with scope:
                    logits, loss = objective(letters, peaks, last)
                    loss.backward()
        adam.step()
        adam.zero_grad()
        if config.watched:
            share_board(board, logits, peaks, config.watched)
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: {loss.item() * config.accumulate:.4f}", flush=True)


def main():
    config = configure()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(config)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
