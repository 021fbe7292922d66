"""Sorts faults of woven cloth from the loom's camera, on several processes.

torchrun --nproc-per-node 2 loom_faults.py
"""

import argparse
import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

KINDS = ["sound", "broken end", "mispick", "float", "slub", "stain"]


def weave(amount, generator):
    """Makes pictures of cloth with the fault that each has."""
    kinds = torch.randint(len(KINDS), (amount,), generator=generator)
    cloth = 0.3 * torch.randn(amount, 1, 64, 64, generator=generator)
    cloth[:, :, ::2] += 0.5
    for kind in range(1, len(KINDS)):
        chosen = kinds == kind
        cloth[chosen, :, 8 * kind : 8 * kind + 4, :] += 0.2 * kind
    return cloth, kinds


class ClothNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        )
        self.wide = nn.Linear(32 * 16 * 16, 256)
        self.top = nn.Linear(256, len(KINDS))

    def forward(self, cloth):
        return self.top(F.relu(self.wide(self.body(cloth))))


class LoomTrainer:
    def __init__(self, args):
        self.args, self.rank = args, dist.get_rank()
        torch.manual_seed(17)
        self.net = ClothNet()
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr, fused=True)
        self.generator = torch.Generator().manual_seed(100 + self.rank)
        self.cloth, self.kinds = weave(1500, self.generator)
        self.direction = F.normalize(torch.randn(32 * 16 * 16), dim=0)
        self.stretch = torch.zeros(())
        gc.collect()
        gc.freeze()
        self.gallery = []
        if args.gallery and self.rank == 0:
            self.gallery = [[n, n % 64, n % 48] for n in range(args.gallery)]

    def draw(self):
        rows = torch.randint(len(self.cloth), (self.args.rows,), generator=self.generator)
        return self.cloth[rows], self.kinds[rows]

    def synced(self, micro):
        if self.args.plain or micro == self.args.accumulate - 1:
            return nullcontext()
        return self.model.no_sync()

    def update(self):
        self.optimizer.zero_grad()
        for micro in range(self.args.accumulate):
            cloth, kinds = self.draw()
            with self.synced(micro):
                loss = F.cross_entropy(self.model(cloth), kinds)
                (loss / self.args.accumulate).backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def watch(self):
        """Follows the largest singular value of the wide layer."""
        weight = self.net.wide.weight
        for _ in range(self.args.watch):
            left = F.normalize(weight @ self.direction, dim=0)
            right = weight.T @ left
            self.stretch = right.norm()
            self.direction = right / self.stretch

    def show(self, step):
        """Puts what was seen last into the gallery in place of the oldest."""
        for number in range(self.args.rows):
            place = (step * self.args.rows + number) % len(self.gallery)
            self.gallery[place] = [step, number, place % 48]
        gc.collect()

    def fit(self):
        for step in range(1, self.args.steps + 1):  # the training loop
            loss = self.update()
            if self.rank == 0:
                if self.args.watch:
                    self.watch()
                if self.gallery:
                    self.show(step)
                if step % 50 == 0:
                    print(f"{step}: {loss.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="pictures in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--plain", action="store_true", help="each micro-batch like any other")
    parser.add_argument("--watch", type=int, default=0, help="power iterations for the layer's norm")
    parser.add_argument("--gallery", type=int, default=0, help="finds kept for the gallery")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    LoomTrainer(args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
