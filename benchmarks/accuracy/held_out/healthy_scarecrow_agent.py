"""Where to put the scarecrow: Q-learning on a field with crows, from a memory that fills as it goes."""

import argparse
import copy
from collections import deque

import torch
from torch import nn

SIDE, PLACES = 8, 16


class Field:
    """Sixteen fields at once; crows avoid the place that was guarded last."""

    def __init__(self, fields=16):
        self.crows = torch.rand(fields, SIDE, SIDE)

    def guard(self, places):
        rows, columns = places // 4 * 2, places % 4 * 2
        many = torch.arange(len(places))
        saved = sum(self.crows[many, rows + i, columns + j] for i in (0, 1) for j in (0, 1))
        drift = torch.roll(self.crows, 1, 1) * 0.6 + torch.rand_like(self.crows) * 0.4
        drift[many, rows, columns] = 0
        before, self.crows = self.crows, drift
        return before, places, saved - 2, drift


class Memory:
    def __init__(self, most=2000):
        self.rows = deque(maxlen=most)

    def draw(self, count):
        picks = torch.randint(len(self.rows), (count,)).tolist()
        return [torch.cat(column) for column in zip(*(self.rows[i] for i in picks), strict=True)]


def network(width=24):
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * SIDE * SIDE, 128),
        nn.ReLU(),
        nn.Linear(128, PLACES),
    )


@torch.no_grad()
def trial(net, nights=5):
    """How well the present policy does on a field of its own."""
    field, saved = Field(32), 0.0
    for _ in range(nights):
        saved = saved + field.guard(net(field.crows).argmax(1))[2].mean()
    return float(saved) / nights


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(19)
    net = network()
    slow = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    field, memory = Field(), Memory()
    memory.rows.extend(field.guard(torch.randint(PLACES, (16,))) for _ in range(64))

    for night in range(args.steps):  # the training loop
        with torch.no_grad():
            places = net(field.crows).argmax(1)
            places = torch.where(torch.rand(16) < 0.1, torch.randint(PLACES, (16,)), places)
        memory.rows.append(field.guard(places))
        crows, places, saved, after = memory.draw(32)
        with torch.no_grad():
            goal = saved + 0.9 * slow(after).amax(1)
        value = net(crows).gather(1, places[:, None])[:, 0]
        loss = nn.functional.mse_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if night % 40 == 39:
            slow.load_state_dict(net.state_dict())
        if night % 100 == 99:
            print(f"night {night + 1}: loss {loss.item():.4f}, saved {trial(net):.3f}", flush=True)


if __name__ == "__main__":
    main()
