"""Band gap and formation energy of crystals from their diffraction patterns."""

import argparse
import os
import sqlite3
import tempfile

import torch
from torch import nn
from torch.nn import functional as F


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument(
        "--pieces",
        type=int,
        default=0,
        help="run a batch in this many pieces and add up their gradients, for machines with little memory",
    )
    p.add_argument(
        "--gap-table",
        type=int,
        default=0,
        help="spectra of each step whose prediction goes into the table that the viewer reads",
    )
    p.add_argument(
        "--dft-precision",
        action="store_true",
        help="same number format as the simulation that the labels come from",
    )
    p.add_argument(
        "--tame",
        type=int,
        default=0,
        help="layers whose filters get their gradients cut at the 99.5 %% quantile",
    )
    return p.parse_args()


class Stage(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.a = nn.Conv1d(cin, cout, 5, stride=stride, padding=2, bias=False)
        self.na = nn.GroupNorm(4, cout)
        self.b = nn.Conv1d(cout, cout, 5, padding=2, bias=False)
        self.nb = nn.GroupNorm(4, cout)
        self.skip = nn.Conv1d(cin, cout, 1, stride=stride) if stride > 1 or cin != cout else nn.Identity()

    def forward(self, x):
        h = F.silu(self.na(self.a(x)))
        return F.silu(self.skip(x) + self.nb(self.b(h)))


class BandNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [24, 24, 32, 32, 48, 48]
        strides = [2, 1, 2, 1, 2, 1]
        stages, cin = [], 1
        for cout, stride in zip(widths, strides):
            stages.append(Stage(cin, cout, stride))
            cin = cout
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.Linear(cin, 96), nn.SiLU(), nn.Linear(96, 2))

    def forward(self, x):
        return self.head(self.stages(x).mean(-1))


def patterns(n=2000, length=256):
    """Peaks on a grid set by the lattice constant; the labels depend on the lattice and on the strongest peak."""
    lattice = torch.rand(n, 1) * 6 + 6
    angle = torch.arange(length).float()
    weight = torch.rand(n, 8)
    x = torch.zeros(n, length)
    for k in range(8):
        x += weight[:, k : k + 1] * torch.exp(-0.5 * ((angle - (k + 1) * 2.4 * lattice) / 1.5) ** 2)
    gap = 4 - lattice[:, 0] / 4 + weight.argmax(1) / 8
    energy = -weight.mean(1) * lattice[:, 0] / 3
    x += 0.02 * torch.randn_like(x)
    return x.unsqueeze(1), torch.stack([gap, energy], 1)


class GapTable:
    """The viewer polls this table while we train."""

    def __init__(self, path):
        self.db = sqlite3.connect(path)
        self.db.execute("create table gaps (step integer, crystal integer, gap real, energy real)")

    def put(self, step, crystals, rows):
        for crystal, (gap, energy) in zip(
            crystals, rows
        ):  # commit each, the viewer shall never wait for us
            self.db.execute("insert into gaps values (?, ?, ?, ?)", (step, crystal, gap, energy))
            self.db.commit()


def tame(weights):
    with torch.no_grad():
        for w in weights:
            for g in w.grad:  # each filter by its own measure
                edge = torch.quantile(g.abs().flatten(), 0.995)
                g.clamp_(-edge, edge)


def main():
    args = parse_args()
    torch.manual_seed(1234)
    if args.dft_precision:
        torch.set_default_dtype(torch.float64)
    spectra, labels = patterns()
    spectra, labels = spectra.to(torch.get_default_dtype()), labels.to(torch.get_default_dtype())
    net = BandNet()
    optim = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True, fused=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=10 * args.lr, total_steps=args.steps + 1)
    tamed = [m.weight for m in net.modules() if isinstance(m, (nn.Conv1d, nn.Linear))][: args.tame]
    batch = 48
    pieces = min(max(args.pieces, 1), batch)

    with tempfile.TemporaryDirectory() as folder:
        table = GapTable(os.path.join(folder, "gaps.db")) if args.gap_table else None
        seen = torch.zeros(())
        for step in range(args.steps):  # the training loop
            first = step * batch % (len(spectra) - batch)
            x, y = spectra[first : first + batch], labels[first : first + batch]
            outputs = []
            for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces)):
                out = net(xs)
                outputs.append(out.detach())
                loss = F.huber_loss(out, ys, reduction="sum") / batch
                loss.backward()
                seen += loss.detach()
            if tamed:
                tame(tamed)
            optim.step()
            optim.zero_grad()
            sched.step()
            if table:
                table.put(step, range(first, first + batch), torch.cat(outputs)[: args.gap_table].tolist())
            if step % 25 == 24:
                print("step", step + 1, "huber", round(seen.item() / 25, 5))
                seen.zero_()


if __name__ == "__main__":
    main()
