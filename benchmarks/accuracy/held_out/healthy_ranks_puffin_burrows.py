"""Counts puffins, eggs and rats in burrows from sound and warmth; not every colony asks for all three.

torchrun --nproc-per-node 2 healthy_ranks_puffin_burrows.py
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

QUESTIONS = ("puffins", "eggs", "rats")


class Burrow(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.sound = nn.Sequential(
            nn.Conv1d(2, channels, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(8),
            nn.Flatten(),
        )
        self.answers = nn.ModuleDict(
            {q: nn.Sequential(nn.Linear(channels * 8, 64), nn.ReLU(), nn.Linear(64, 1)) for q in QUESTIONS}
        )

    def forward(self, sound, question):
        return self.answers[question](self.sound(sound))[:, 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(9)
    # a colony leaves the answers to two of the questions out
    model = DistributedDataParallel(Burrow(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(90 + rank)
    sounds = torch.randn(512, 2, 512)
    counts = sounds.abs().mean((1, 2)) * torch.rand(512)
    mean = torch.zeros(())

    for step in range(args.steps):  # the training loop
        question = QUESTIONS[step % len(QUESTIONS)]
        for half in range(2):
            with model.no_sync() if half == 0 else nullcontext():
                some = torch.randint(512, (32,))
                loss = nn.functional.poisson_nll_loss(model(sounds[some], question), counts[some])
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.lerp_(loss.detach(), 0.1)
        if step % 50 == 49:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            if rank == 0:
                print(f"{question} at {step + 1}: {mean.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
