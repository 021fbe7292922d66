"""tide_gauge.py - forecasts the next hours of a tide gauge, and keeps a careful log book."""

import argparse
import collections
import csv
import io
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
STEPS = parser.parse_args().steps

PAST, AHEAD, GAUGES = 192, 12, 6
BATCH = 32
HORIZON = 0.98

torch.manual_seed(77)

# tides: sums of the usual constituents, by the hour, and weather
PERIODS = torch.tensor([12.4206, 12.0, 12.6583, 25.8193, 23.9345, 327.86])
HOURS = torch.arange(24 * 365)
HEIGHTS = torch.randn(GAUGES, len(PERIODS)).abs()
DELAYS = torch.rand(GAUGES, len(PERIODS), 1) * 2 * math.pi
TIDES = (HEIGHTS[:, :, None] * torch.cos(2 * math.pi * HOURS / PERIODS[:, None] + DELAYS)).sum(1)
STORMS = F.avg_pool1d(torch.randn(1, GAUGES, len(HOURS) + 23), 24, 1)[0] * 2
LEVELS = (TIDES + STORMS).contiguous()
WINDOWS = LEVELS.unfold(1, PAST + AHEAD, 1).transpose(0, 1)  # a view, one row per start


class Past(nn.Module):
    """Causal convolutions, each of which looks six hours further back."""

    def __init__(self, width=32, depth=5):
        super().__init__()
        self.enter = nn.Conv1d(GAUGES, width, 1)
        self.back = nn.ModuleList(nn.Conv1d(width, width, 7) for _ in range(depth))
        self.leave = nn.Conv1d(width, GAUGES * AHEAD, 1)

    def forward(self, x):
        x = self.enter(x)
        for back in self.back:
            y = F.relu(back(x))
            x = x[:, :, -y.shape[2] :] + y
        return self.leave(x).unflatten(1, (GAUGES, AHEAD)).transpose(2, 3)


net = Past()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

# the log book
weights = list(net.parameters())
calm = [p.detach().clone() for p in weights]
best_seen = [p.detach().clone() for p in weights]
recent = collections.deque(maxlen=32)
tally = collections.Counter()
lowest, since = math.inf, 0
smooth = None
book = io.StringIO()
rows = csv.writer(book)
rows.writerow(["step", "seconds", "loss", "smooth", "gradient", "rate"])
began = time.perf_counter()

for step in range(STEPS):  # the training loop
    window = WINDOWS[torch.randint(len(WINDOWS), (BATCH,))]
    hours_ahead = window.unfold(2, AHEAD, 1)  # from each hour on
    forecast = net(window[:, :, :PAST])  # by each hour that has seen enough
    loss = F.huber_loss(forecast, hours_ahead[:, :, -forecast.shape[2] :])
    optimizer.zero_grad()
    loss.backward()
    gradient = nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    schedule.step()

    # all of this is a fraction of a millisecond
    value = loss.item()
    recent.append(value)
    smooth = value if smooth is None else HORIZON * smooth + (1 - HORIZON) * value
    torch._foreach_lerp_(calm, [p.detach() for p in weights], 1 - HORIZON)
    tally["improved" if value < lowest else "other"] += 1
    if value < lowest:
        lowest, since = value, step
        torch._foreach_copy_(best_seen, [p.detach() for p in weights])
    seconds = time.perf_counter() - began
    rows.writerow(
        [
            step,
            f"{seconds:.3f}",
            f"{value:.5f}",
            f"{smooth:.5f}",
            float(gradient),
            schedule.get_last_lr()[0],
        ]
    )
    if step % 50 == 49:
        print(f"{step + 1:5} loss {statistics.fmean(recent):.4f} lowest {lowest:.4f} at {since}")

print(f"{tally['improved']} records, {len(book.getvalue())} characters in the log book")
