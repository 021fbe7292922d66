"""Learns to place the macros of a chip on a grid: deep Q-learning that plays several boards at once."""

import argparse
import math
import random

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

GRID = 12
MACROS = 24
BOARDS = 8
BATCH = 64
LINES = np.arange(GRID, dtype=np.float32)


class Board:
    """One floorplan in the making. The macros come in a fixed order, one a move."""

    def __init__(self, pull, netlist):
        self.pull, self.netlist = pull, netlist

    def reset(self):
        self.taken = np.zeros((GRID, GRID), dtype=np.float32)
        self.spots = np.zeros((MACROS, 2), dtype=np.float32)
        self.where = [None] * MACROS
        self.turn, self.length = 0, 0.0
        return self.observe()

    def observe(self):
        weights, spots = self.pull[self.turn, : self.turn], self.spots[: self.turn]
        down = weights @ np.abs(LINES - spots[:, :1])
        across = weights @ np.abs(LINES - spots[:, 1:])
        self.distance = down[:, None] + across
        view = np.empty((4, GRID, GRID), dtype=np.float32)
        view[0], view[1] = self.taken, self.distance
        view[2], view[3] = self.pull[self.turn].mean(), self.turn / MACROS
        return view

    def wirelength(self):
        total = 0
        for pins in self.netlist:
            rows = [self.where[pin][0] for pin in pins if self.where[pin]]
            columns = [self.where[pin][1] for pin in pins if self.where[pin]]
            if len(rows) > 1:
                total += max(rows) - min(rows) + max(columns) - min(columns)
        return total / len(self.netlist)

    def place(self, cell):
        row, column = divmod(cell, GRID)
        reward = -2.0 if self.taken[row, column] else 0.0
        self.taken[row, column] = 1.0
        self.spots[self.turn] = row, column
        self.where[self.turn] = row, column
        if self.netlist:
            length = self.wirelength()
            reward += self.length - length
            self.length = length
        else:
            reward -= float(self.distance[row, column])
        self.turn += 1
        over = self.turn == MACROS
        return self.reset() if over else self.observe(), reward, over


class Memory:
    def __init__(self, room):
        self.before = torch.zeros(room, 4, GRID, GRID)
        self.after = torch.zeros(room, 4, GRID, GRID)
        self.cell = torch.zeros(room, dtype=torch.long)
        self.reward, self.over = torch.zeros(room), torch.zeros(room)
        self.room, self.next, self.filled = room, 0, 0

    def add(self, before, cells, rewards, after, over):
        place = slice(self.next, self.next + len(cells))
        self.before[place], self.after[place] = torch.from_numpy(before), torch.from_numpy(after)
        self.cell[place], self.reward[place] = torch.tensor(cells), torch.tensor(rewards)
        self.over[place] = torch.tensor(over, dtype=torch.float32)
        self.next = (self.next + len(cells)) % self.room
        self.filled = min(self.room, self.filled + len(cells))

    def draw(self, amount):
        rows = torch.randint(0, self.filled, (amount,))
        return self.before[rows], self.cell[rows], self.reward[rows], self.after[rows], self.over[rows]


class QNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.middle = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(3)])
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, view):
        x = nn.functional.relu(self.first(view))
        for conv in self.middle:
            x = x + nn.functional.relu(conv(x))
        return self.last(x).flatten(1).masked_fill(view[:, 0].flatten(1) > 0, -50.0)


class Waves(LRScheduler):
    """A warm-up, then cosine waves that lose height, over a run of `planned` updates."""

    def __init__(self, optimizer, planned, waves=6):
        self.planned, self.waves, self.warmup = planned, waves, planned // 50
        super().__init__(optimizer)

    def curve(self, base):
        rates = []
        for update in range(self.planned + 1):
            if update < self.warmup:
                rates.append(base * (update + 1) / self.warmup)
            else:
                wave, phase = divmod((update - self.warmup) * self.waves / self.planned, 1.0)
                rates.append(base * 0.8**wave * (0.05 + 0.475 * (1 + math.cos(math.pi * phase))))
        return rates

    def get_lr(self):
        return [self.curve(base)[min(self.last_epoch, self.planned)] for base in self.base_lrs]


class Placer:
    def __init__(self, planned):
        self.online, self.target = QNet(), QNet().requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())
        weights = [p for p in self.online.parameters() if p.ndim > 1]
        biases = [p for p in self.online.parameters() if p.ndim == 1]
        groups = [{"params": weights, "weight_decay": 1e-3}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=5e-4, fused=True)
        if planned:
            self.schedule = Waves(self.optimizer, planned)
        else:
            self.schedule = LambdaLR(self.optimizer, lambda update: min(1.0, (update + 1) / 25))
        self.updates = 0

    @torch.no_grad()
    def choose(self, views, curiosity):
        cells = self.online(torch.from_numpy(views)).argmax(1).tolist()
        return [random.randrange(GRID * GRID) if random.random() < curiosity else cell for cell in cells]

    def learn(self, memory):
        before, cell, reward, after, over = memory.draw(BATCH)
        with torch.no_grad():
            wanted = reward + 0.97 * (1 - over) * self.target(after).amax(1)
        value = self.online(before).gather(1, cell[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.updates += 1
        if self.updates % 50 == 0:
            self.target.load_state_dict(self.online.state_dict())
        return loss.detach()


def play(placer, boards, views, memory, curiosity):
    cells = placer.choose(views, curiosity)
    moves = [board.place(cell) for board, cell in zip(boards, cells, strict=False)]
    after = np.stack([view for view, _, _ in moves])
    memory.add(views, cells, [reward for _, reward, _ in moves], after, [over for _, _, over in moves])
    return after


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nets", type=int, default=0, help="reward from the wirelength of so many nets")
    parser.add_argument("--planned", type=int, default=0, help="updates that the wave schedule spans")
    args = parser.parse_args()
    torch.manual_seed(12)
    random.seed(12)
    rng = np.random.default_rng(12)
    pull = rng.gamma(0.5, 0.04, size=(MACROS, MACROS)).astype(np.float32)
    pull = (pull + pull.T) / 2
    netlist = [tuple(random.sample(range(MACROS), random.randint(3, 5))) for _ in range(args.nets)]
    boards = [Board(pull, netlist) for _ in range(BOARDS)]
    views = np.stack([board.reset() for board in boards])
    placer, memory = Placer(args.planned), Memory(4096)
    for _ in range(16):
        views = play(placer, boards, views, memory, curiosity=1.0)
    while placer.updates < args.steps:  # the training loop
        views = play(placer, boards, views, memory, max(0.1, 1 - placer.updates / 150))
        loss = placer.learn(memory)
        if placer.updates % 50 == 0:
            rate = placer.optimizer.param_groups[0]["lr"]
            print(f"update {placer.updates} loss {loss.item():.4f} rate {rate:.2e}")


if __name__ == "__main__":
    main()
