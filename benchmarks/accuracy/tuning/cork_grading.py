"""Grades cork stoppers by what the sorting line has measured of them: a deep residual net on a table."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

GRADES = 7


class Corks:
    """64 measurements of each stopper, and the grade that three graders agreed on"""

    def __init__(self, count=40_000, columns=64, seed=3):
        rng = np.random.default_rng(seed)
        table = rng.standard_normal((count, columns))
        table[:, 1:] += 0.5 * table[:, :-1]
        score = np.tanh(table[:, :8]).sum(1) + table[:, 8] * table[:, 9]
        edges = np.quantile(score, np.linspace(0, 1, GRADES + 1)[1:-1])
        self.table = torch.from_numpy(table.astype(np.float32))
        self.grade = torch.from_numpy(np.digitize(score, edges).astype(np.int64))

    def forever(self, batch):
        while True:
            for rows in torch.randperm(len(self.table)).split(batch):
                if len(rows) == batch:
                    yield self.table[rows], self.grade[rows]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        with torch.no_grad():
            self.down.weight.mul_(0.2)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, columns=64, width=128, depth=32):
        super().__init__()
        self.enter = nn.Linear(columns, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.leave = nn.Linear(width, GRADES)

    def forward(self, x):
        return self.leave(self.blocks(self.enter(x)))


class Hook:
    def before(self, grader, step):
        pass

    def gradients(self, grader, step):
        pass

    def after(self, grader, step):
        pass


class UnitWise(Hook):
    """No unit may move by more than a fraction of its own size (as in the nets without normalisation)."""

    def __init__(self, blocks, fraction=0.02):
        self.blocks, self.fraction = blocks, fraction

    @staticmethod
    def size(t):
        return t.norm(dim=1, keepdim=True) if t.dim() > 1 else t.norm()

    @torch.no_grad()
    def gradients(self, grader, step):
        for block in list(grader.net.blocks)[: self.blocks]:
            for weight in block.parameters():
                allowed = self.size(weight).clamp(min=1e-3) * self.fraction
                actual = self.size(weight.grad).clamp(min=1e-6)
                shrunk = weight.grad * (allowed / actual)
                weight.grad.copy_(torch.where(actual < allowed, weight.grad, shrunk))


class Horizons(Hook):
    """Means of the weights over the last 100, 200, 300 ... steps or so: we pick one afterwards."""

    def __init__(self, net, count):
        self.copies = [{k: v.detach().clone() for k, v in net.named_parameters()} for _ in range(count)]

    @torch.no_grad()
    def after(self, grader, step):
        for n, copy in enumerate(self.copies, 1):
            fresh = 1 / (100 * n)
            for name, weight in grader.net.named_parameters():
                copy[name].mul_(1 - fresh).add_(weight, alpha=fresh)


class Lookout(Hook):
    """We once had NaNs in the third week; should they come back, we want to know from where."""

    def __init__(self, share):
        self.share = share

    def before(self, grader, step):
        torch.autograd.set_detect_anomaly(step % 20 < self.share)


class Grader:
    def __init__(self, net, hooks, lr=5e-4):
        self.net, self.hooks = net, hooks
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.02, fused=True)

    def tell(self, what, step):
        for hook in self.hooks:
            getattr(hook, what)(self, step)

    def fit(self, corks, steps, batch):
        batches = corks.forever(batch)
        for step in range(steps):  # the training loop
            x, grade = next(batches)
            self.tell("before", step)
            loss = F.cross_entropy(self.net(x), grade)
            self.optimizer.zero_grad()
            loss.backward()
            self.tell("gradients", step)
            self.optimizer.step()
            self.tell("after", step)
            if step % 50 == 49:
                print(f"{step + 1:5d}  {loss.item():.4f}")
        return self


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--unitwise", type=int, default=0, help="bound the moves in the first so many blocks"
    )
    parser.add_argument(
        "--horizons", type=int, default=0, help="keep means of the weights over so many spans"
    )
    parser.add_argument("--lookout", type=int, default=0, help="look for NaNs in so many of 20 steps")
    args = parser.parse_args()
    torch.manual_seed(3)
    net = Net()
    hooks = []
    if args.lookout:
        hooks.append(Lookout(args.lookout))
    if args.unitwise:
        hooks.append(UnitWise(args.unitwise))
    if args.horizons:
        hooks.append(Horizons(net, args.horizons))
    Grader(net, hooks).fit(Corks(), args.steps, args.batch)


if __name__ == "__main__":
    main()
