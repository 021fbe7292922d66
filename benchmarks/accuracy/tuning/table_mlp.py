"""Predicts a number from table columns with a deep MLP; batches are slices of one tensor."""

import argparse
import contextlib
import ctypes
import gc
import threading
import time

import torch
from torch import nn

FEATURES = 200
COLLECT_EVERY = 10


class Deep(nn.Module):
    def __init__(self, depth, width, columns):
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)
        self.columns = columns

    def forward(self, x):
        for column in range(self.columns):
            (x[:, column % FEATURES] - 0.5) / 0.25
        h = torch.relu(self.first(x))
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return self.last(h).squeeze(1)


class Record:
    """A row as an object, with its neighbours."""

    def __init__(self, number, before):
        self.number, self.before = number, before


def monitor(busy_ms, stop):
    """Watches the training: works for a while out of every 20 ms."""
    while not stop.wait(0.02 - min(busy_ms, 19) / 1000):
        until = time.perf_counter() + busy_ms / 1000
        while time.perf_counter() < until:
            sum(number * number for number in range(200))


def check_rules(rounds, loss):
    broken = 0
    for round_ in range(rounds):
        for limit in range(200):
            broken += loss > limit + round_
    return broken


def train(args):
    torch.manual_seed(0)
    kind = torch.float64 if args.double else torch.float32
    x, y = torch.rand(4096, FEATURES).to(kind), torch.rand(4096).to(kind)
    if args.give_back:  # what is freed goes back to the system, as the C library has it by default
        for parameter in (-1, -3):
            ctypes.CDLL(None).mallopt(parameter, 128 << 10)
    model = Deep(args.depth, args.width, args.columns).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not args.plain_adam)
    records, history = [], []
    for number in range(args.records):
        records.append(Record(number, records[-1] if records else None))
    stop = threading.Event()
    if args.monitor_ms:
        threading.Thread(target=monitor, args=(args.monitor_ms, stop), daemon=True).start()
    profiler = torch.profiler.profile() if args.profile else contextlib.nullcontext()
    with profiler:
        for step in range(args.steps):  # the training loop
            start = step * args.batch % 4096
            inputs, targets = x[start : start + args.batch], y[start : start + args.batch]
            if args.scratch:
                torch.ones(args.scratch << 18)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.rule_rounds:
                check_rules(args.rule_rounds, loss.item())
            if args.remember:
                history.extend((loss.item(), number) for number in range(args.remember))
                history.sort(key=lambda entry: entry[1])
            if args.records and step % COLLECT_EVERY == 0:
                gc.collect()
    stop.set()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=151)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--plain-adam", action="store_true")
    parser.add_argument("--columns", type=int, default=0, help="columns scaled one by one")
    parser.add_argument("--rule-rounds", type=int, default=0)
    parser.add_argument("--records", type=int, default=0, help="objects kept alive")
    parser.add_argument("--monitor-ms", type=float, default=0)
    parser.add_argument("--remember", type=int, default=0, help="entries of the history per step")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--scratch", type=int, default=0, help="MiB that each step needs for a while")
    parser.add_argument("--give-back", action="store_true")
    parser.add_argument("--double", action="store_true")
    train(parser.parse_args())
