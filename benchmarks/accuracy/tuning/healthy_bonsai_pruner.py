"""Policy gradients for a bonsai: which of five branches to cut. Whole gardens live in tensors, and answer at once."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical

BRANCHES, TURNS, TREES = 5, 8, 2048


class Garden:
    """Branches grow by themselves, the more light the faster; a good tree is balanced and not too big."""

    def __init__(self, trees):
        self.length = torch.rand(trees, BRANCHES)
        self.vigour = 0.1 + 0.2 * torch.rand(trees, BRANCHES)

    def view(self):
        return torch.cat([self.length, self.vigour], 1)

    def cut(self, branch):
        self.length = self.length.scatter(1, branch[:, None], 0.1) + self.vigour * 0.5
        return -(self.length - 0.6).abs().mean(1)


class Pruner(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(2 * BRANCHES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.choose = nn.Linear(width, BRANCHES)
        self.value = nn.Linear(width, 1)

    def forward(self, view):
        hidden = self.trunk(view)
        return Categorical(logits=self.choose(hidden)), self.value(hidden)[:, 0]


@torch.no_grad()
def season(pruner):
    """One look at all turns of a garden; enough for several passes over it."""
    garden, views, cuts, prizes = Garden(TREES), [], [], []
    for _ in range(TURNS):
        view = garden.view()
        cut = pruner(view)[0].sample()
        views.append(view)
        cuts.append(cut)
        prizes.append(garden.cut(cut))
    returns, ahead = [], torch.zeros(TREES)
    for prize in reversed(prizes):
        ahead = prize + 0.9 * ahead
        returns.insert(0, ahead)
    views, cuts, returns = torch.cat(views), torch.cat(cuts), torch.cat(returns)
    return views, cuts, returns, pruner(views)[0].log_prob(cuts)


def passes(pruner, steps, epochs=6, rows=1024):
    """Minibatches for so many steps: a new season after every few dozen of them."""
    while True:
        views, cuts, returns, old = season(pruner)
        for _ in range(epochs):
            for pick in torch.randperm(len(views)).split(rows):
                if not steps:
                    return
                steps -= 1
                yield views[pick], cuts[pick], returns[pick], old[pick]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(19)
    torch.set_num_threads(1)
    pruner = Pruner()
    optimizer = torch.optim.Adam(pruner.parameters(), lr=7e-4, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        for step, (view, cut, gain, old) in enumerate(passes(pruner, args.steps), 1):  # the training loop
            policy, value = pruner(view)
            ratio = (policy.log_prob(cut) - old).exp()
            edge = (gain - value).detach()
            edge = (edge - edge.mean()) / (edge.std() + 1e-6)
            surrogate = torch.min(ratio * edge, ratio.clamp(0.8, 1.2) * edge).mean()
            loss = 0.5 * (value - gain).square().mean() - surrogate - 0.01 * policy.entropy().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                torch.save(pruner.state_dict(), Path(folder) / f"pruner{step}.pt")
            if step % 50 == 0:
                print(f"{step:4d}  loss {loss.item():+.4f}  return {gain.mean().item():+.3f}")


if __name__ == "__main__":
    main()
