"""A walker learns its way through mazes: double Q-learning from a replay buffer.

64 mazes are walked at once, all in a handful of tensor operations; one step in all of them per update.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

SIZE = 9
MOVES = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])


class Mazes:
    """Many mazes side by side: walls, a walker and a goal each."""

    def __init__(self, count, generator):
        self.count, self.generator = count, generator
        walls = torch.rand(count, SIZE, SIZE, generator=generator) < 0.2
        walls[:, 0, :] = walls[:, -1, :] = walls[:, :, 0] = walls[:, :, -1] = True
        walls[:, 1, 1] = walls[:, -2, -2] = False
        self.walls = walls
        self.each = torch.arange(count)
        self.walker = torch.ones(count, 2, dtype=torch.long)
        self.age = torch.randint(0, 60, (count,), generator=generator)

    def observe(self):
        planes = torch.zeros(self.count, 3, SIZE, SIZE)
        planes[:, 0] = self.walls
        planes[self.each, 1, self.walker[:, 0], self.walker[:, 1]] = 1.0
        planes[:, 2, -2, -2] = 1.0
        return planes.flatten(1)

    def step(self, action):
        target = self.walker + MOVES[action]
        blocked = self.walls[self.each, target[:, 0], target[:, 1]]
        self.walker = torch.where(blocked.unsqueeze(1), self.walker, target)
        arrived = (self.walker == SIZE - 2).all(1)
        self.age += 1
        over = arrived | (self.age >= 60)
        reward = arrived.float() - 0.01 - 0.02 * blocked
        self.walker[over] = 1
        self.age[over] = 0
        return reward, arrived


class Replay:
    def __init__(self, capacity, width):
        self.now = torch.zeros(capacity, width)
        self.then = torch.zeros(capacity, width)
        self.action = torch.zeros(capacity, dtype=torch.long)
        self.reward = torch.zeros(capacity)
        self.arrived = torch.zeros(capacity)
        self.capacity, self.at, self.filled = capacity, 0, 0

    def put(self, now, action, reward, then, arrived):
        window = slice(self.at, self.at + len(now))
        self.now[window], self.then[window] = now, then
        self.action[window], self.reward[window], self.arrived[window] = action, reward, arrived.float()
        self.at = (self.at + len(now)) % self.capacity
        self.filled = min(self.filled + len(now), self.capacity)

    def draw(self, count, generator):
        pick = torch.randint(0, self.filled, (count,), generator=generator)
        return self.now[pick], self.action[pick], self.reward[pick], self.then[pick], self.arrived[pick]


class Dueling(nn.Module):
    def __init__(self, inputs, width=320):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, width),
            nn.LayerNorm(width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.SiLU(),
        )
        self.value = nn.Linear(width, 1)
        self.advantage = nn.Linear(width, 4)

    def forward(self, x):
        x = self.body(x)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)


@torch.no_grad()
def act(net, observation, epsilon, generator):
    best = net(observation).argmax(1)
    dice = torch.rand(len(best), generator=generator)
    other = torch.randint(0, 4, (len(best),), generator=generator)
    return torch.where(dice < epsilon, other, best)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=896)
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    mazes = Mazes(64, generator)
    observation = mazes.observe()
    width = observation.shape[1]
    net, slow = Dueling(width), Dueling(width)
    slow.load_state_dict(net.state_dict())
    slow.requires_grad_(False)
    net_tensors, slow_tensors = list(net.parameters()), list(slow.parameters())
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4, fused=True)
    replay = Replay(64 * 256, width)

    walks = []
    for _ in range(256):  # a first stock of walks, without a policy
        action = torch.randint(0, 4, (mazes.count,), generator=generator)
        reward, arrived = mazes.step(action)
        after = mazes.observe()
        walks.append((observation, action, reward, after, arrived))
        observation = after
    replay.put(*map(torch.cat, zip(*walks)))
    walks.clear()

    goals = torch.zeros(())
    for step in range(args.steps):  # the training loop
        epsilon = max(0.05, 1.0 - step / 150)
        action = act(net, observation, epsilon, generator)
        reward, arrived = mazes.step(action)
        after = mazes.observe()
        replay.put(observation, action, reward, after, arrived)
        observation = after
        goals += arrived.sum()

        now, action, reward, then, arrived = replay.draw(args.batch, generator)
        with torch.no_grad():  # the net chooses the next move, its slow copy says what that is worth
            choice = net(then).argmax(1, keepdim=True)
            target = reward + 0.97 * (1 - arrived) * slow(then).gather(1, choice).squeeze(1)
        loss = F.smooth_l1_loss(net(now).gather(1, action.unsqueeze(1)).squeeze(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(slow_tensors, net_tensors, 0.01)

        if step % 40 == 39:
            print(
                f"{step + 1:4d} updates, {int(goals)} goals reached, loss {loss.item():.4f}, epsilon {epsilon:.2f}"
            )


if __name__ == "__main__":
    main()
