"""How many passengers will pass a station's turnstiles in the next hours?

Each reader process has stations of its own, asks their gates for counts, and cuts windows out of them.
A temporal convolution forecasts eight quarters of an hour.
"""

import argparse
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

PAST, NEXT, SERIES = 96, 8, 6
LINK_MS = 0.25  # a gate's answer


class Stations(IterableDataset):
    def __init__(self, rows, hub_gates, readers):
        self.rows, self.hub_gates, self.readers = rows, hub_gates, readers

    def ask(self, station):
        """The gates of a station answer one after the other; the hub has many of them."""
        gates = 4 + (self.hub_gates if station == 0 else 0)
        time.sleep(gates * LINK_MS / 1000)

    def __iter__(self):
        reader = get_worker_info().id
        rng = np.random.default_rng(reader)
        quarter = np.arange(8000, dtype=np.float32)[:, None]
        phase = rng.uniform(0, 6.28, SERIES).astype(np.float32)
        counts = np.sin(quarter * 6.2832 / 96 + phase) + 0.5 * np.sin(quarter * 6.2832 / 672 + 2 * phase)
        counts += rng.normal(0, 0.1, counts.shape).astype(np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(counts, PAST + NEXT, 0)
        while True:
            self.ask(station=reader % self.readers)
            chosen = torch.from_numpy(windows[rng.integers(0, len(windows), self.rows)].copy())
            yield chosen[:, :, :PAST], chosen[:, 0, PAST:]


def dilated(wide, dilation):
    return nn.Sequential(
        nn.Conv1d(wide, wide, 3, padding=dilation, dilation=dilation),
        nn.BatchNorm1d(wide),
        nn.ReLU(inplace=True),
    )


def network(wide=64):
    return nn.Sequential(
        nn.Conv1d(SERIES, wide, 5, padding=2),
        *[dilated(wide, 2**n) for n in range(5)],
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(4 * wide, NEXT),
    )


def timeline(active, tables):
    """The timeline of the last steps of every twenty."""
    if not active:
        return nullcontext()
    return profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=19 - active, warmup=1, active=active),
        on_trace_ready=lambda trace: tables.append(len(trace.key_averages())),
        record_shapes=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--hub-gates", type=int, default=0, help="further gates of the hub")
    parser.add_argument(
        "--timeline", type=int, default=0, help="steps of every twenty to be looked at later"
    )
    args = parser.parse_args()
    torch.manual_seed(1904)

    source = Stations(args.rows, args.hub_gates, args.readers)
    loader = DataLoader(source, batch_size=None, num_workers=args.readers, multiprocessing_context="fork")
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, fused=True)
    criterion = nn.HuberLoss()
    tables = []
    incoming = iter(loader)
    with timeline(args.timeline, tables) as trace:
        for step in range(1, args.steps + 1):  # the training loop
            past, wanted = next(incoming)
            loss = criterion(net(past), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if trace is not None:
                trace.step()
            if step % 60 == 0:
                print(f"after {step} steps: {loss.item():.4f}")


if __name__ == "__main__":
    main()
