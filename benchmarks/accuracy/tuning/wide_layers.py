"""A few wide layers, and how the process is placed on the machine."""

import argparse
import os
import subprocess
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--threads", type=int, default=0)
parser.add_argument("--pin", action="store_true")
parser.add_argument("--neighbours", type=int, default=0, help="other jobs on the machine")
args = parser.parse_args()
if args.threads:
    torch.set_num_threads(args.threads)
if args.pin:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
BUSY = "import time; end = time.time() + 60\nwhile time.time() < end: pass"
others = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(args.neighbours)]

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
sgd = torch.optim.SGD(net.parameters(), lr=0.05)
x, y = torch.randn(256, 512), torch.randint(10, (256,))
try:
    for _ in range(args.steps):  # the training loop
        sgd.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        sgd.step()
finally:
    for other in others:
        other.kill()
