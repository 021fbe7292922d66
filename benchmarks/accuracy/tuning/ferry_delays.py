"""Predict the delay of ferry sailings from the last 24 calls of the vessel, on two ranks (torchrun, gloo)."""

import argparse
import gc
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CALLS = 24
FEATURES = 20
WIDTH = 64


class MixerBlock(nn.Module):
    """Mixes over the calls of a vessel, then over the features."""

    def __init__(self, calls, width):
        super().__init__()
        self.norm_calls = nn.LayerNorm(width)
        self.mix_calls = nn.Linear(calls, calls)
        self.norm_width = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        x = x + self.mix_calls(self.norm_calls(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm_width(x))))


class DelayModel(nn.Module):
    def __init__(self, depth=7):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(MixerBlock(CALLS, WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


class Sailing:
    """One entry of the sailing register; knows the sailing before and after it, delays are handed on."""

    def __init__(self, number, previous):
        self.number = number
        self.predicted = 0.0
        self.previous = previous
        self.following = None
        if previous is not None:
            previous.following = self


class Register:
    """What the control room sees: kept by rank 0, where the dashboard is served from."""

    def __init__(self, sailings):
        self.sailings = []
        previous = None
        for number in range(sailings):
            previous = Sailing(number, previous if number % 40 else None)
            self.sailings.append(previous)
        self.cursor = 0

    def enter(self, delays):
        for delay in delays:
            old = self.sailings[self.cursor]
            new = Sailing(old.number + len(self.sailings), None)
            new.predicted = delay
            new.previous, new.following = old.previous, old.following
            self.sailings[self.cursor] = new
            self.cursor = (self.cursor + 1) % len(self.sailings)


def make_history(count, generator):
    """Synthetic calls: tide, wind, load, hour of day and so on, and the delay they lead to."""
    x = generator.standard_normal((count, CALLS, FEATURES), dtype=np.float32)
    wind, load, tide = x[:, :, 0], x[:, :, 1], x[:, :, 2]
    delay = np.maximum(wind, 0).mean(1) * 2 + (load * tide)[:, -8:].mean(1)
    noise = np.exp(0.3 * x[:, -1, 3])
    return torch.from_numpy(x), torch.from_numpy(
        delay + 0.1 * noise * generator.standard_normal(count, dtype=np.float32)
    )


def sailings_per_rank(rank, per_rank, surge, dice):
    """How many sailings each rank gets. The feed is keyed by coast; in a surge one coast is the busier one."""
    tilt = int(round(surge * dice.uniform(0.8, 1.0))) * (1 if dice.random() < 0.5 else -1)
    return per_rank + (tilt if rank == 0 else -tilt)


@torch.no_grad()
def unitwise_norm(tensor):
    if tensor.ndim <= 1:
        return tensor.norm()
    return tensor.norm(dim=tuple(range(1, tensor.ndim)), keepdim=True)


@torch.no_grad()
def adaptive_clip(parameters, factor=0.02, eps=1e-3):
    """Adaptive gradient clipping, as in NFNets: a gradient may be no larger than a share of its weights."""
    clipped = 0
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        limit = unitwise_norm(parameter).clamp_(min=eps).mul_(factor)
        norm = unitwise_norm(grad)
        if bool((norm > limit).any()):
            clipped += 1
        shrunk = grad * (limit / norm.clamp(min=1e-6))
        grad.copy_(torch.where(norm < limit, grad, shrunk))
    return clipped


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--per-rank", type=int, default=32, help="sailings per rank and step")
    parser.add_argument(
        "--register", type=int, default=0, help="thousands of sailings in the control room's register"
    )
    parser.add_argument(
        "--surge", type=int, default=0, help="sailings that move from the quiet coast to the busy one"
    )
    parser.add_argument("--agc-blocks", type=int, default=0, help="blocks with adaptive gradient clipping")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    generator = np.random.default_rng(100 + rank)
    dice = np.random.default_rng(7)  # the same on both ranks

    history, delays = make_history(6000, generator)
    model = DistributedDataParallel(DelayModel(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    clipped_blocks = [p for block in model.module.blocks[: args.agc_blocks] for p in block.parameters()]
    gc.collect()
    gc.freeze()  # what is here now stays until the end

    register = Register(1000 * args.register) if args.register and rank == 0 else None
    model.train()
    start = 0
    for step in range(args.steps):  # the training loop
        count = sailings_per_rank(rank, args.per_rank, args.surge, dice)
        if start + count > len(history):
            start = 0
        x, y = history[start : start + count], delays[start : start + count]
        start += count

        mean, log_scale = model(x).unbind(1)
        nll = 0.5 * ((y - mean) * torch.exp(-log_scale)).square() + log_scale
        loss = nll.sum() / args.per_rank  # DDP averages over ranks: the same as the mean over all sailings
        loss.backward()
        if clipped_blocks:
            adaptive_clip(clipped_blocks)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        if register is not None:
            register.enter(mean.tolist())
            if step % 2 == 1:
                gc.collect()  # replaced sailings still hold on to each other
        if rank == 0 and step % 50 == 0:
            print(f"step {step:4d}  nll {loss.item():.4f}  lr {schedule.get_last_lr()[0]:.2e}", flush=True)

    if rank == 0:
        print("done,", os.environ.get("WORLD_SIZE"), "ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
