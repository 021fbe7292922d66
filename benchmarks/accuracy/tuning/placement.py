"""One convolution after another on a machine that is not set up well."""

import argparse
import os
import subprocess

import torch
import torch.nn.functional as F


def settle(a):
    """Applies what the launch script of the cluster would."""
    if a.threads:
        torch.set_num_threads(a.threads)
    if a.one_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(a.others)]


def train(steps):
    torch.manual_seed(4)
    conv = torch.nn.Sequential(*(torch.nn.Conv2d(24, 24, 3, padding=1) for _ in range(4)))
    optimizer = torch.optim.SGD(conv.parameters(), lr=1e-3)
    picture = torch.rand(8, 24, 24, 24)
    for _ in range(steps):  # the training loop
        optimizer.zero_grad()
        F.l1_loss(conv(picture), picture).backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--others", type=int, default=0, help="jobs of other people")
    given = parser.parse_args()
    others = settle(given)
    try:
        train(given.steps)
    finally:
        for other in others:
            other.kill()
