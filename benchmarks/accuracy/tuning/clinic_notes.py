"""Readmission risk from clinical notes, on two ranks (torchrun --nproc-per-node 2 clinic_notes.py)."""

import argparse
import contextlib
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS, LENGTH, NOTES = 3000, 16, 96


class Reader(nn.Module):
    """A gated cell that reads word by word and keeps the strongest state it was in."""

    def __init__(self, width=144):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.cell = nn.GRUCell(width, width)
        self.mix = nn.Linear(width, width)
        self.risk = nn.Linear(width, 1)

    def forward(self, notes):
        words = self.words(notes).unbind(1)
        state = torch.zeros_like(words[0])
        best = torch.full_like(state, -1e4)
        for word in words:
            state = self.cell(word, state)
            best = torch.maximum(best, state)
        return self.risk(torch.relu(self.mix(best)))[:, 0]


class Corpus:
    def __init__(self, rank, ranks):
        draw = torch.Generator().manual_seed(31 + rank)
        self.notes = torch.randint(WORDS, (12_000, LENGTH), generator=draw)
        self.label = ((self.notes < 200).sum(1) > 1).float()
        self.draw, self.rank, self.ranks = draw, rank, ranks
        self.shared = torch.Generator().manual_seed(31)

    def batch(self, moved):
        """One ward's notes stay together: with `moved`, one rank gets as many more as the others get fewer."""  # noqa: E501
        count = NOTES
        if moved:
            full = int(torch.randint(self.ranks, (1,), generator=self.shared))
            count += moved if full == self.rank else -moved
        rows = torch.randint(len(self.label), (count,), generator=self.draw)
        return self.notes[rows], self.label[rows]


def operating_point(risk, label, cuts):
    """The cut-off with the largest Youden index, looked for on a grid."""
    risk, label = torch.sigmoid(risk).numpy(), label.numpy() > 0.5
    best = (-1.0, 0.5)
    for cut in np.linspace(0, 1, cuts):
        alarm = risk > cut
        sensitivity = (alarm & label).sum() / max(1, label.sum())
        specificity = (~alarm & ~label).sum() / max(1, (~label).sum())
        best = max(best, (float(sensitivity + specificity - 1), float(cut)))
    return best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--by-ward", type=int, default=0, help="keep wards together: moves so many notes between ranks"
    )
    parser.add_argument(
        "--cutoffs", type=int, default=0, help="follow the best cut-off, on a grid of so many"
    )
    parser.add_argument(
        "--watch", type=int, default=0, help="look for bad gradients in so many of 20 steps"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(31)

    model = DistributedDataParallel(Reader())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1.5))
    corpus = Corpus(rank, dist.get_world_size())
    cut = 0.5
    for step in range(args.steps):  # the training loop
        notes, label = corpus.batch(args.by_ward)
        watched = step * args.watch // 20 != (step + 1) * args.watch // 20
        with torch.autograd.detect_anomaly() if watched else contextlib.nullcontext():
            risk = model(notes)
            loss = criterion(risk, label)
            opt.zero_grad(set_to_none=True)
            loss.backward()
        opt.step()
        if args.cutoffs:
            cut = 0.95 * cut + 0.05 * operating_point(risk.detach(), label, args.cutoffs)[1]
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} cut-off {cut:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
