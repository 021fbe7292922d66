"""Names mosses by the outlines of their leaves, which are sequences of points of different lengths.

Two workers stay alive, measure the outlines once, and remember what they measured; a batch is
padded to its longest outline.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, get_worker_info

MOSSES = 12


class Herbarium(Dataset):
    def __init__(self, sheets=640):
        self.kinds = np.random.default_rng(1801).integers(0, MOSSES, sheets)
        self.remembered = {}

    def __len__(self):
        return len(self.kinds)

    def measure(self, sheet):
        rng = np.random.default_rng(sheet)
        turn = np.linspace(0, 2 * np.pi, int(rng.integers(30, 60)))
        radius = 1 + 0.3 * np.cos((2 + self.kinds[sheet]) * turn) + rng.normal(0, 0.05, turn.size)
        points = np.stack([radius * np.cos(turn), radius * np.sin(turn), np.gradient(radius)], 1)
        return torch.from_numpy(points.astype(np.float32))

    def __getitem__(self, sheet):
        if sheet not in self.remembered:
            self.remembered[sheet] = self.measure(sheet)
        return self.remembered[sheet], int(self.kinds[sheet])


def padded(sheets):
    outlines, kinds = zip(*sheets)
    lengths = torch.tensor([len(outline) for outline in outlines])
    return pad_sequence(outlines, batch_first=True), lengths, torch.tensor(kinds)


def set_up(worker):
    np.random.seed(get_worker_info().seed % 2**32)


class Outliner(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.lift = nn.Linear(3, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.mix = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.name = nn.Linear(width, MOSSES)

    def forward(self, outlines, lengths):
        beyond = torch.arange(outlines.shape[1]) >= lengths[:, None]
        x = self.mix(self.lift(outlines), src_key_padding_mask=beyond)
        x = x.masked_fill(beyond[..., None], 0).sum(1) / lengths[:, None]
        return self.name(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(2)
    torch.set_num_threads(1)
    loader = DataLoader(
        Herbarium(),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        collate_fn=padded,
        worker_init_fn=set_up,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    model = Outliner()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    done, sum_of_losses = 0, torch.zeros(())
    while done < args.steps:
        for outlines, lengths, kinds in loader:  # the training loop
            loss = nn.functional.cross_entropy(model(outlines, lengths), kinds)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sum_of_losses += loss.detach()
            done += 1
            if done == args.steps:
                break
        print(f"{done} batches, mean loss {sum_of_losses.item() / done:.3f}")


if __name__ == "__main__":
    main()
