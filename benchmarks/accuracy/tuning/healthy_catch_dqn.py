"""Learns to catch falling balls by deep Q-learning, on many boards at once."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Catch:
    def __init__(self, boards, side):
        self.boards, self.side = boards, side
        self.every = torch.arange(boards)
        self.row = torch.randint(side - 1, (boards,))
        self.column = torch.randint(side, (boards,))
        self.paddle = torch.randint(side, (boards,))

    def look(self):
        view = torch.zeros(self.boards, 2, self.side, self.side, dtype=torch.uint8)
        view[self.every, 0, self.row, self.column] = 1
        view[self.every, 1, self.side - 1, self.paddle] = 1
        return view

    def act(self, moves):
        self.paddle = (self.paddle + moves - 1).clamp(0, self.side - 1)
        self.row = self.row + 1
        over = self.row == self.side - 1
        caught = (self.paddle - self.column).abs() <= 1
        reward = over.float() * (2 * caught.float() - 1)
        self.row = self.row.masked_fill(over, 0)
        self.column = torch.where(over, torch.randint(self.side, (self.boards,)), self.column)
        return reward, over


class Replay:
    def __init__(self, room, side):
        self.before = torch.zeros(room, 2, side, side, dtype=torch.uint8)
        self.after = torch.zeros_like(self.before)
        self.moves = torch.zeros(room, dtype=torch.long)
        self.rewards, self.going = torch.zeros(room), torch.zeros(room)
        self.room, self.next, self.filled = room, 0, 0

    def add(self, before, moves, rewards, over, after):
        place = slice(self.next, self.next + len(moves))
        self.before[place], self.after[place] = before, after
        self.moves[place], self.rewards[place], self.going[place] = moves, rewards, 1 - over.float()
        self.next = (self.next + len(moves)) % self.room
        self.filled = min(self.room, self.filled + len(moves))

    def sample(self, amount):
        rows = torch.randint(self.filled, (amount,))
        before, after = self.before[rows].float(), self.after[rows].float()
        return before, self.moves[rows], self.rewards[rows], self.going[rows], after


def q_network(side):
    return nn.Sequential(
        nn.Conv2d(2, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * (side // 2) ** 2, 256),
        nn.ReLU(),
        nn.Linear(256, 3),
    )


class Agent:
    def __init__(self, boards=8, side=14, batch=96):
        self.boards, self.batch = boards, batch
        self.game, self.memory = Catch(boards, side), Replay(512 * boards, side)
        self.online, self.target = q_network(side), q_network(side)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=5e-4, fused=True)
        self.view = self.game.look()

    @torch.no_grad()
    def play(self, epsilon):
        moves = torch.randint(3, (self.boards,))
        if epsilon < 1:
            greedy = self.online(self.view.float()).argmax(1)
            moves = torch.where(torch.rand(self.boards) < epsilon, moves, greedy)
        rewards, over = self.game.act(moves)
        after = self.game.look()
        self.memory.add(self.view, moves, rewards, over, after)
        self.view = after

    def learn(self):
        before, moves, rewards, going, after = self.memory.sample(self.batch)
        with torch.no_grad():
            goal = rewards + 0.97 * going * self.target(after).amax(1)
        value = self.online(before).gather(1, moves[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(11)
    agent = Agent()
    for _ in range(60):
        agent.play(epsilon=1.0)
    step = 0
    while step < args.steps:  # the training loop
        agent.play(epsilon=max(0.05, 0.9 - step / 150))
        loss = agent.learn()
        step += 1
        if step % 50 == 0:
            agent.target.load_state_dict(agent.online.state_dict())
            print(f"{step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
