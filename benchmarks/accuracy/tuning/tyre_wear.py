"""How much rubber does a lap cost? Telemetry of racing cars, corner by corner.

    torchrun --nproc-per-node 2 tyre_wear.py

Every rank reads the laps of one team.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CHANNELS, CORNERS = 9, 14


class Laps:
    """Invented laps: speed, brake, throttle, steering, ... at each of the corners."""

    def __init__(self, team, count=20_000):
        source = torch.Generator().manual_seed(40 + team)
        rule = torch.Generator().manual_seed(4)
        self.signal = torch.randn(count, CORNERS, CHANNELS, generator=source)
        stress = torch.randn(CHANNELS, 4, generator=rule)
        self.wear = (self.signal @ stress).square().mean(1).sqrt()
        self.source = source

    def draw(self, size):
        picks = torch.randint(len(self.wear), (size,), generator=self.source)
        return self.signal[picks], self.wear[picks]


class WearNet(nn.Module):
    def __init__(self, dim=48, depth=9):
        super().__init__()
        self.lift = nn.Linear(CHANNELS, dim)
        self.corner = nn.Parameter(0.02 * torch.randn(CORNERS, dim))
        layers = [
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.body = nn.ModuleList(layers)
        self.tyres = nn.Linear(dim, 4)

    def forward(self, signal):
        x = self.lift(signal) + self.corner
        for layer in self.body:
            x = layer(x)
        return self.tyres(x.mean(1))


class Horizon:
    """The weights as they were, on the whole, over the last so many steps."""

    def __init__(self, net, length):
        self.keep = 1 - 1 / length
        self.net = copy.deepcopy(net).requires_grad_(False)

    def follow(self, net):
        for mine, new in zip(self.net.parameters(), net.parameters()):
            mine.mul_(self.keep).add_(new.detach(), alpha=1 - self.keep)


class Garage:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(11)
        net = WearNet()
        self.horizons = [Horizon(net, 20 * (i + 1)) for i in range(args.horizons)]
        self.net = self.wrap(net)
        self.laps = Laps(self.rank)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=6e-4, weight_decay=0.01, fused=True)

    def wrap(self, net):
        if not self.args.bunches:
            return DDP(net, gradient_as_bucket_view=True)
        size = sum(4 * p.numel() for p in net.parameters()) / self.args.bunches
        return DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=size / 2**20)

    def lap(self):
        signal, wear = self.laps.draw(self.args.laps)
        loss = nn.functional.smooth_l1_loss(self.net(signal), wear)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for horizon in self.horizons:
            horizon.follow(self.net.module)
        return loss

    def drive(self):
        for number in range(self.args.steps):  # the training loop
            loss = self.lap()
            if self.rank == 0 and number % 40 == 0:
                print(f"after {number} steps: {loss.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--laps", type=int, default=20, help="laps that a rank takes at a time")
    parser.add_argument("--bunches", type=int, default=0, help="in how many bunches gradients travel")
    parser.add_argument(
        "--horizons", type=int, default=0, help="memories of the weights, 20 steps, 40, 60, ..."
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Garage(args).drive()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
