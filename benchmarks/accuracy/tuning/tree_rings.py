"""Dates timber: the year of the youngest ring from 200 ring widths. Two ranks, four micro-batches to a step."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RINGS, BINS = 200, 64
PARTS = 4


class Dater(nn.Module):
    """Strides over the rings with a small convolution, then thinks about them with wide layers."""

    def __init__(self, width=640):
        super().__init__()
        self.look = nn.Conv1d(1, 8, kernel_size=9, stride=4, padding=4)
        self.think = nn.Sequential(
            nn.Linear(8 * RINGS // 4, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, BINS),
        )

    def forward(self, widths):
        seen = torch.relu(self.look(widths.unsqueeze(1)))
        return self.think(seen.flatten(1))


def forest(trees, rank):
    """Trees that all grew under the same weather, at different times."""
    common = torch.Generator().manual_seed(4)
    weather = torch.randn(RINGS + BINS, generator=common)
    own = torch.Generator().manual_seed(40 + rank)
    year = torch.randint(BINS, (trees,), generator=own)
    place = year[:, None] + torch.arange(RINGS)
    widths = weather[place] + 0.7 * torch.randn(trees, RINGS, generator=own)
    return widths, year


class Dendrochronology:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.net = DDP(Dater(), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=0.02, momentum=0.9, nesterov=True, fused=True
        )
        self.widths, self.year = forest(4096, self.rank)
        self.criterion = nn.CrossEntropyLoss()
        self.at = 0

    def part(self):
        rows = self.args.rows
        if self.at + rows > len(self.year):
            self.at = 0
        cut = slice(self.at, self.at + rows)
        self.at += rows
        return self.widths[cut], self.year[cut]

    def gentleness(self):
        """How much the answer moves when the ruler slips a little; added up once, for all, by the first rank."""
        net, total = self.net.module, 0.0
        sample = self.widths[:12]
        for _ in range(self.args.slips):
            slipped = sample + 0.05 * torch.randn_like(sample)
            total = total + (net(slipped) - net(sample).detach()).square().mean()
        return self.world * 0.1 * total / self.args.slips

    def context(self, last):
        if last or self.args.plain:
            return contextlib.nullcontext()
        return self.net.no_sync()

    def step(self):
        total = torch.zeros(())
        for part in range(PARTS):
            with self.context(part == PARTS - 1):
                widths, year = self.part()
                loss = self.criterion(self.net(widths), year) / PARTS
                total += loss.detach()
                if self.args.slips and part == 0 and self.rank == 0:
                    loss = loss + self.gentleness()
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def fit(self):
        for step in range(self.args.steps):  # the training loop
            loss = self.step()
            if step % 40 == 0 and self.rank == 0:
                print(f"[{step}] cross-entropy {loss.item():.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=24, help="trees in a micro-batch")
    parser.add_argument("--plain", action="store_true", help="treat all micro-batches alike")
    parser.add_argument(
        "--slips", type=int, default=0, help="slips of the ruler that the answer should bear"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    Dendrochronology(args).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
