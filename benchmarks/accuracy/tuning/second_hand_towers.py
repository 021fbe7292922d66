# %% [markdown]
# Two towers for a second-hand market: what a user looked at, and what is on offer.
# (exported from the notebook; the cells are in their old order)

# %%
import argparse
import atexit
import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

cli = argparse.ArgumentParser()
cli.add_argument("--steps", type=int, default=240)
cli.add_argument("--batch", type=int, default=512)
cli.add_argument("--repeatable", action="store_true", help="the same sums in every run, to the last bit")
cli.add_argument("--events", type=int, default=0, help="latest events of a user that count; default 16")
cli.add_argument("--ack", type=float, default=0, help="milliseconds that the index needs for fresh rows")
cli.add_argument("--cohorts", type=int, default=0, help="cohorts for which exposure is written down")
cli.add_argument("--cutoffs", type=int, default=0, help="recall at 5, 10, 15, ...")
cli.add_argument("--shadow", type=float, default=0, help="thousands of pairs per round of the shadow index")
cli.add_argument("--prices", type=float, default=0, help="milliseconds until prices of a batch are here")
args = cli.parse_args()

rng = np.random.default_rng(101)
torch.manual_seed(101)
if args.repeatable:
    torch.set_num_threads(1)

# %% the catalogue and the log: events of all users one after another, as they come from the warehouse
USERS, ITEMS, WIDTH, FACTS = 16_000, 24_000, 64, 128
RESELLERS = 5  # they look at everything
counts = rng.integers(6, 17, USERS)
counts[rng.choice(USERS, RESELLERS, replace=False)] = 150_000
ends = torch.from_numpy(np.cumsum(counts))
lengths = torch.from_numpy(counts)
seen = torch.from_numpy((ITEMS * rng.random(int(counts.sum()), dtype=np.float32) ** 2).astype(np.int64))
bought = torch.from_numpy(rng.integers(0, ITEMS, USERS))
facts = torch.from_numpy(rng.standard_normal((ITEMS, FACTS)).astype(np.float32))


# %%
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.event = nn.Sequential(nn.Linear(WIDTH, 192), nn.GELU(), nn.Linear(192, WIDTH))
        self.offer = nn.Sequential(nn.Linear(WIDTH + FACTS, 256), nn.GELU(), nn.Linear(256, WIDTH))
        self.warmth = nn.Parameter(torch.tensor(2.0))

    def of_users(self, events, owner, count):
        told = self.event(self.items(events))
        total = told.new_zeros(len(count), WIDTH).index_add(0, owner, told)
        return F.normalize(total / count.unsqueeze(1), dim=1)

    def of_items(self, rows):
        return F.normalize(self.offer(torch.cat([self.items(rows), facts[rows]], 1)), dim=1)

    def forward(self, events, owner, count, rows):
        return self.warmth.exp() * self.of_users(events, owner, count) @ self.of_items(rows).T


def histories(users, most):
    """The latest events of these users, in one row, and whose they are."""
    count = lengths[users].clamp(max=most)
    owner = torch.repeat_interleave(count)
    place = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
    return seen[(ends[users] - count)[owner] + place], owner, count


def rounds(size):
    while True:
        yield from torch.randperm(USERS).split(size)


# %% prices move; whoever buys dear things counts for more
def priced(users_of_batches, seconds):
    ready = queue.Queue(2)

    def ask():
        for users in islice(users_of_batches, args.steps):
            time.sleep(seconds)
            ready.put((users, 1 + torch.from_numpy(np.log1p(counts[users] % 7)).float()))

    threading.Thread(target=ask, daemon=True).start()
    while True:
        yield ready.get()


# %% the index that answers the searches gets the rows that have changed
INDEX = """
import sys, time
for line in sys.stdin:
    time.sleep(float(line.split()[0]) / 1000)
    print("stored", flush=True)
"""


class LiveIndex:
    def __init__(self, milliseconds):
        command = [sys.executable, "-S", "-c", INDEX]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.milliseconds = milliseconds
        atexit.register(self.process.kill)

    def push(self, rows):
        print(self.milliseconds, len(rows), file=self.process.stdin, flush=True)
        return self.process.stdout.readline().startswith("stored")


# %% and a second one is built on the side, to compare neighbours with last week's
SHADOW = """
import os, sys, time
pairs, parent, state = int(1000 * float(sys.argv[1])), int(sys.argv[2]), 1
while os.getppid() == parent:
    best = 0
    for _ in range(pairs):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        best = max(best, state ^ pairs)
    time.sleep(0.03)
"""


def shadow_index(pairs):
    """One half of the catalogue per process."""
    for _ in range(2):
        helper = subprocess.Popen([sys.executable, "-S", "-c", SHADOW, str(pairs), str(os.getpid())])
        atexit.register(helper.kill)


# %% who was shown what, by cohort: editors look at it now and then
exposure = [defaultdict(float) for _ in range(args.cohorts)]
last_shown = {}


def write_down(step, users, rows):
    for user, row in zip(users.tolist(), rows.tolist(), strict=True):
        for number, table in enumerate(exposure):
            fading = 0.9 if (user + number) % 3 else 0.99
            table[row] = 1 + fading * table[row]
        last_shown[row] = step


# %% how often the bought one is among the first
@torch.no_grad()
def recall(scores, cutoffs):
    truth = torch.arange(len(scores)).unsqueeze(1)
    return [
        (scores.topk(5 * n).indices == truth).any(1).float().mean().item() for n in range(1, cutoffs + 1)
    ]


# %%
model = Towers()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4, fused=True)
index = LiveIndex(args.ack) if args.ack else None
if args.shadow:
    shadow_index(args.shadow)
stream = rounds(args.batch)
batches = priced(stream, args.prices / 1000) if args.prices else ((users, None) for users in stream)
recalls = []

# %%
for step, (users, weights) in zip(range(args.steps), batches, strict=False):  # the training loop
    rows = bought[users]
    scores = model(*histories(users, args.events or 16), rows)
    losses = F.cross_entropy(scores, torch.arange(len(users)), reduction="none")
    loss = losses.mean() if weights is None else (losses * weights).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.cutoffs:
        recalls.append(recall(scores, args.cutoffs))
    if args.cohorts:
        write_down(step, users, rows)
    if index:
        index.push(rows)
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3f}")

# %%
if recalls:
    print("recall", np.mean(recalls, axis=0).round(3))
print(f"done after {args.steps} steps, loss {loss.item():.3f}")
