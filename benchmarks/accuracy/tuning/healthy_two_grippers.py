"""Clones demonstrations of a gripper: from a camera image and the joints to the next eight commands.

Started by torchrun with two processes; each takes two micro-batches for every step.
"""

import argparse
import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

JOINTS, COMMANDS = 14, 8


@dataclass
class Demonstrations:
    images: torch.Tensor
    joints: torch.Tensor
    actions: torch.Tensor

    @classmethod
    def synthesise(cls, amount, generator):
        images = torch.rand(amount, 3, 32, 32, generator=generator)
        joints = torch.randn(amount, JOINTS, generator=generator)
        way = torch.linspace(0.1, 0.8, COMMANDS)[:, None]
        goal = images.mean((2, 3)).repeat(1, 3)[:, : JOINTS // 2]
        actions = joints[:, None, : JOINTS // 2] * (1 - way) + goal[:, None] * way
        return cls(images, joints, actions.flatten(1))

    def sample(self, rows, generator):
        picked = torch.randint(len(self.images), (rows,), generator=generator)
        return self.images[picked], self.joints[picked], self.actions[picked]


def stage(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
    )


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.eye = nn.Sequential(stage(3, 16), stage(16, 32), stage(32, 64), nn.Flatten())
        self.mind = nn.Sequential(
            nn.Linear(64 * 4 * 4 + JOINTS, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, COMMANDS * JOINTS // 2),
        )

    def forward(self, images, joints):
        return self.mind(torch.cat([self.eye(images), joints], 1))


def train(steps, rows=80, micro_batches=2):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(900 + rank)
    data = Demonstrations.synthesise(2048, generator)
    torch.manual_seed(0)
    policy = DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-4, fused=True)
    for step in range(steps):  # the training loop
        optimizer.zero_grad()
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with contextlib.nullcontext() if is_last else policy.no_sync():
                images, joints, actions = data.sample(rows, generator)
                loss = nn.functional.l1_loss(policy(images, joints), actions)
                (loss / micro_batches).backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"{step}: {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
