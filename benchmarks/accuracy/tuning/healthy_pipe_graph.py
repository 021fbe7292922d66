"""Leaks in a water network: message passing, accumulated over graphs, averaged weights, rare evaluation."""

import argparse
import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Network:
    pressure: Tensor  # a row per junction
    ends: Tensor  # 2 x pipes
    leak: Tensor

    @staticmethod
    def random(junctions: int, gen: torch.Generator) -> "Network":
        here = torch.arange(junctions).repeat(3)
        there = (here + torch.randint(1, 40, here.shape, generator=gen)) % junctions
        leak = torch.rand(junctions, generator=gen) < 0.1
        pressure = torch.randn(junctions, 8, generator=gen)
        pressure[:, 0] -= 1.5 * leak
        pressure[there, 1] -= 0.5 * leak[here]
        return Network(
            pressure, torch.cat([torch.stack([here, there]), torch.stack([there, here])], 1), leak.float()
        )


class Hop(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.message = nn.Linear(width, width)
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        heard = torch.zeros_like(x).index_add_(0, target, self.message(x).index_select(0, source))
        return self.norm(x + self.update(torch.cat([x, heard], 1)))


class LeakFinder(nn.Module):
    def __init__(self, width: int = 64, hops: int = 3):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.hops = nn.ModuleList(Hop(width) for _ in range(hops))
        self.last = nn.Linear(width, 1)

    def forward(self, net: Network) -> Tensor:
        source, target = net.ends
        x = self.first(net.pressure).relu()
        for hop in self.hops:
            x = hop(x, source, target)
        return self.last(x).squeeze(1)


class Trainer:
    def __init__(self, model: nn.Module, accumulate: int, total: int):
        self.model = model
        self.averaged = copy.deepcopy(model).requires_grad_(False)
        self.accumulate = accumulate
        self.weights = list(model.parameters())
        self.averages = list(self.averaged.parameters())
        self.optimizer = torch.optim.AdamW(self.weights, lr=3e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=total + 1)
        self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0))

    def step(self, nets: list) -> Tensor:
        total = torch.zeros(())
        for net in nets:
            loss = self.criterion(self.model(net), net.leak) / self.accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.weights, 0.02)
        return total

    @torch.no_grad()
    def recall(self, nets: list) -> float:
        hits = sum(((self.averaged(net) > 0) * net.leak).sum() for net in nets)
        return float(hits / sum(net.leak.sum() for net in nets))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.empty(30 << 20, dtype=torch.uint8)  # malloc is to keep freed memory
    torch.manual_seed(8)
    gen = torch.Generator().manual_seed(8)
    train = [Network.random(1500, gen) for _ in range(60)]
    test = [Network.random(1500, gen) for _ in range(4)]
    trainer = Trainer(LeakFinder(), accumulate=2, total=args.steps)
    for step in range(args.steps):  # the training loop
        loss = trainer.step([train[(2 * step) % 60], train[(2 * step + 1) % 60]])
        if step % 50 == 49:
            print(
                f"step {step + 1}: loss {float(loss):.3f}, recall of the averaged model {trainer.recall(test):.3f}"  # noqa: E501
            )


if __name__ == "__main__":
    main()
