"""Names pieces of furniture from voxel grids, which worker processes unpack."""

import argparse
import time
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 24
BATCH = 16
PIECES = 96
KINDS = 8


class Furniture(Dataset):
    """Grids are kept as bits; the parts of a piece are described beside it."""

    def __init__(self, pieces, args):
        self.pieces = pieces
        self.fetch, self.retry = args.fetch / 1000, args.retry / 1000
        filled = torch.rand(PIECES, SIDE**3 // 8, 8) > 0.7
        self.bits = (filled.long() << torch.arange(8)).sum(2).to(torch.uint8)
        self.powers = torch.arange(8, dtype=torch.uint8)
        self.parts = [
            [
                {"part": f"p{piece}-{number}", "at": (number * 0.5, piece * 0.25), "turned": number / 7}
                for number in range(args.parts)
            ]
            for piece in range(PIECES)
        ]

    def __len__(self):
        return self.pieces

    def read(self, index):
        if self.fetch:
            time.sleep(self.fetch)
        if self.retry and index % 160 == 80:
            for attempt in range(3):
                time.sleep(self.retry * 2**attempt / 7)
        return self.bits[index % PIECES]

    def __getitem__(self, index):
        bits = self.read(index).unsqueeze(1) >> self.powers & 1
        grid = bits.view(SIDE, SIDE, SIDE).float()
        if index % 2:
            grid = grid.flip(0)
        return grid, index % KINDS, self.parts[index % PIECES]


def collate(items):
    grids, kinds, parts = zip(*items, strict=True)
    stacked = torch.stack(grids)
    targets = torch.column_stack([torch.tensor(kinds), stacked.mean((1, 2, 3))])
    return stacked.unsqueeze(1), targets, parts


def make_loader(furniture, args):
    return DataLoader(
        furniture,
        batch_size=BATCH,
        shuffle=True,
        num_workers=args.workers,
        collate_fn=collate,
        persistent_workers=True,
    )


def endless(args):
    furniture = Furniture((args.per_epoch or args.steps) * BATCH, args)
    loader = make_loader(furniture, args)
    while True:
        yield from loader
        if args.rebuild:
            loader = make_loader(furniture, args)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv3d(1, 24, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv3d(24, 96, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv3d(96, 96, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(96, 96, 3, padding=1),
            nn.ReLU(),
        )
        self.kind, self.filled = nn.Linear(96, KINDS), nn.Linear(96, 1)

    def forward(self, grids):
        features = self.convolutions(grids).amax((2, 3, 4))
        return self.kind(features), self.filled(features).squeeze(1)


def precision_recall(scores, wanted, thresholds):
    curve = []
    for number in range(thresholds):
        cut = number / thresholds
        taken = [want for score, want in zip(scores, wanted, strict=True) if score >= cut]
        hits = sum(taken)
        curve.append((hits / max(1, len(taken)), hits / max(1, sum(wanted))))
    return curve


def main(args):
    torch.manual_seed(23)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps + 1)
    best, most = 0.0, 0
    for grids, targets, parts in islice(endless(args), args.steps):  # the training loop
        kinds, filled = targets[:, 0].long(), targets[:, 1]
        logits, guess = net(grids)
        loss = nn.functional.cross_entropy(logits, kinds) + 0.1 * nn.functional.mse_loss(guess, filled)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        most = max(most, *map(len, parts))
        if args.thresholds:
            sure = logits.detach().softmax(1)
            for kind in range(KINDS):
                curve = precision_recall(sure[:, kind].tolist(), (kinds == kind).tolist(), args.thresholds)
                best = max(best, max(p * r for p, r in curve))
    print(f"loss {loss.item():.4f}, best {best:.3f}, most parts {most}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=100)
    cli.add_argument("--per-epoch", type=int, default=0, help="steps of an epoch; 0: all")
    cli.add_argument("--workers", type=int, default=2)
    cli.add_argument("--fetch", type=float, default=0, help="milliseconds to fetch a piece")
    cli.add_argument("--retry", type=float, default=0, help="milliseconds to get at a piece that is locked")
    cli.add_argument("--parts", type=int, default=0, help="descriptions of parts that come with a piece")
    cli.add_argument("--thresholds", type=int, default=0, help="points of each precision-recall curve")
    cli.add_argument("--rebuild", action="store_true", help="make the loader anew for each epoch")
    main(cli.parse_args())
