"""How long will a ship wait at the lock? Two ranks, each with the records of its own canal."""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import huber_loss
from torch.nn.parallel import DistributedDataParallel as DDP

HOURS, SIGNALS = 24, 32


def day_sheets(days, seed):
    rng = np.random.default_rng(seed)
    sheets = rng.standard_normal((days, HOURS, SIGNALS))
    wait = np.abs(sheets[:, :, 0]).mean(1) + np.maximum(sheets[:, -6:, 1], 0).sum(1) / 3
    return torch.from_numpy(sheets.astype(np.float32)), torch.from_numpy(wait.astype(np.float32))


class LockKeeper(nn.Module):
    def __init__(self, width=160):
        super().__init__()
        sizes = [SIGNALS, width, width, width, width]
        hourly = []
        for fan_in, fan_out in zip(sizes, sizes[1:]):
            hourly += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.hourly = nn.Sequential(*hourly)
        self.daily = nn.Sequential(
            nn.LayerNorm(2 * width), nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, sheet):
        hours = self.hourly(sheet)
        return self.daily(torch.cat([hours.mean(1), hours[:, -1]], 1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--days", type=int, default=56, help="days in a rank's batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(77)
    sheets, wait = day_sheets(4000, seed=rank)
    keeper = DDP(LockKeeper(), gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(keeper.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=max(args.steps, 1))
    dice = torch.Generator().manual_seed(rank)
    for step in range(args.steps):  # the training loop
        days = torch.randint(len(wait), (args.days,), generator=dice)
        loss = huber_loss(keeper(sheets[days]), wait[days])
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"after {step + 1} steps: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
