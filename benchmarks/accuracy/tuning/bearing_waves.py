"""Tells worn bearings apart by their vibration: a learnable filter bank, then a residual 1-D network."""

import argparse
import math
import queue
import threading
import time
from collections import namedtuple
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

KINDS, SAMPLES, TAPS = 6, 1024, 65

Recording = namedtuple("Recording", "waves kinds")


def band_filters(count):
    """Windowed sinc filters, evenly spaced in frequency."""
    ticks = torch.arange(TAPS, dtype=torch.float64) - TAPS // 2
    window = torch.hann_window(TAPS, periodic=False, dtype=torch.float64)
    edges = torch.linspace(0.01, 0.49, count + 1, dtype=torch.float64)
    low = [2 * edge * torch.sinc(2 * edge * ticks) for edge in edges]
    return torch.stack([(upper - lower) * window for lower, upper in pairwise(low)]).unsqueeze(1)


class FilterBank(nn.Module):
    def __init__(self, width, as_designed):
        super().__init__()
        filters = band_filters(width)
        self.filters = nn.Parameter(filters if as_designed else filters.float())
        self.mix = nn.Conv1d(width, width, 5, padding=2, dtype=self.filters.dtype)

    def forward(self, wave):
        bands = F.conv1d(wave.to(self.filters.dtype), self.filters, stride=4, padding=TAPS // 2)
        return self.mix(bands.abs()).float()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(1, width), nn.GroupNorm(1, width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class BearingNet(nn.Module):
    def __init__(self, width, blocks, as_designed, save_memory):
        super().__init__()
        self.bank = FilterBank(width, as_designed)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, KINDS)
        self.save_memory = save_memory

    def forward(self, wave):
        x = self.bank(wave)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.save_memory else block(x)
        return self.head(x.mean(2))


class Smoothed:
    """An average of the weights over roughly `span` steps."""

    def __init__(self, model, span):
        self.rate = 1 / span
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        for name, value in model.state_dict().items():
            old = self.weights[name]
            old.copy_(old * (1 - self.rate) + value * self.rate)


def clip(params, limit, orders):
    """Clips by the 2-norm; the norms of the other orders go to the report."""
    report = {}
    for order in range(1, orders + 1):
        total = 0.0
        for p in params:
            total += p.grad.data.norm(order).item() ** order
        report[order] = total ** (1 / order)
    factor = limit / (report.get(2, report[1]) + 1e-6)
    if factor < 1:
        for p in params:
            p.grad.data.mul_(factor)
    return report


@torch.no_grad()
def accuracy(model, waves, kinds):
    return (model(waves).argmax(1) == kinds).float().mean().item()


def batches(recording, size, steps):
    order = torch.randperm(len(recording.kinds))
    for step in range(steps):
        chosen = order[torch.arange(step * size, (step + 1) * size) % len(order)]
        yield recording.waves[chosen], recording.kinds[chosen]


def record(count):
    kinds = torch.randint(KINDS, (count,))
    ticks = torch.arange(SAMPLES) / SAMPLES
    hum = torch.sin(2 * math.pi * (20 + 15 * kinds).unsqueeze(1) * ticks)
    return Recording((hum + torch.randn(count, SAMPLES)).unsqueeze(1), kinds)


def send_losses(waiting, seconds):
    while True:
        waiting.get()
        time.sleep(seconds)  # the dashboard is on another machine


def trained_part(model, last, only_eval):
    """Everything, or the last blocks and the head of a model that is trained already."""
    if not last:
        return list(model.parameters())
    for module in (model.bank, *model.blocks[:-last]):
        module.eval()
        if not only_eval:
            module.requires_grad_(False)
    return [*model.blocks[-last:].parameters(), *model.head.parameters()]


def main(args):
    torch.manual_seed(17)
    recording = record(512)
    model = BearingNet(args.width, args.blocks, args.as_designed, args.save_memory)
    params = trained_part(model, args.tune_last, args.only_eval)
    optimizer = torch.optim.Adam(params, lr=3e-4, weight_decay=1e-4, fused=not args.plain)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    smoothed = [Smoothed(model, 10 * (number + 1)) for number in range(args.averages)]
    waiting = queue.Queue(2)
    if args.dashboard:
        threading.Thread(target=send_losses, args=(waiting, args.dashboard / 1000), daemon=True).start()

    right = 0.0
    for waves, kinds in batches(recording, args.batch, args.steps):  # the training loop
        optimizer.zero_grad()
        loss = F.cross_entropy(model(waves), kinds, label_smoothing=0.1)
        loss.backward()
        if args.norms:
            clip(params, 5.0, args.norms)
        if args.train_accuracy:
            right += accuracy(model, waves, kinds)
        optimizer.step()
        schedule.step()
        for average in smoothed:
            average.update(model)
        if args.dashboard:
            waiting.put(loss.item())
    print(f"loss {loss.item():.3f}, accuracy {right / args.steps:.3f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=180)
    cli.add_argument("--batch", type=int, default=32)
    cli.add_argument("--width", type=int, default=48)
    cli.add_argument("--blocks", type=int, default=4)
    cli.add_argument("--as-designed", action="store_true", help="keep the filters as they were designed")
    cli.add_argument("--save-memory", action="store_true")
    cli.add_argument("--train-accuracy", action="store_true")
    cli.add_argument(
        "--averages", type=int, default=0, help="averages of the weights, over 10, 20, ... steps"
    )
    cli.add_argument("--plain", action="store_true", help="the optimizer with its defaults")
    cli.add_argument("--norms", type=int, default=0, help="orders of the gradients' norm to report")
    cli.add_argument("--tune-last", type=int, default=0, help="blocks to fine-tune; 0 trains everything")
    cli.add_argument("--only-eval", action="store_true", help="put the rest into eval mode and no more")
    cli.add_argument("--dashboard", type=float, default=0, help="milliseconds to send a loss")
    main(cli.parse_args())
