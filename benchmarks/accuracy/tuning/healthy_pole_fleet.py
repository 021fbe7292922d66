# REINFORCE with a baseline on a fleet of 256 poles, all simulated at once; several passes over each flight.
import argparse
import math

import torch
from torch import nn
from torch.distributions import Normal

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
ap.add_argument("--horizon", type=int, default=10)
ap.add_argument("--passes", type=int, default=20)
args = ap.parse_args()

torch.empty(30 << 20, dtype=torch.uint8)  # raises malloc's thresholds for good
torch.manual_seed(0)
FLEET = 256


class Policy(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(3, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
        )
        self.mean = nn.Linear(width, 1)
        self.value = nn.Linear(width, 1)
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, seen):
        x = self.trunk(seen)
        return Normal(self.mean(x), self.log_std.exp(), validate_args=False), self.value(x)


def look(angle, speed):
    return torch.cat([angle.cos(), angle.sin(), speed / 8], 1)


@torch.no_grad()
def fly(policy, angle, speed):
    seen, acts, rewards, values, chances = [], [], [], [], []
    for _ in range(args.horizon):
        now = look(angle, speed)
        aim, value = policy(now)
        act = aim.sample()
        push = act.clamp(-2, 2)
        rewards.append(-(angle**2 + 0.1 * speed**2 + 0.001 * push**2))
        speed = (speed + (15 * angle.sin() + 3 * push) * 0.05).clamp(-8, 8)
        angle = torch.remainder(angle + speed * 0.05 + math.pi, 2 * math.pi) - math.pi
        seen.append(now)
        acts.append(act)
        values.append(value)
        chances.append(aim.log_prob(act))
    gain = policy(look(angle, speed))[1]
    returns = []
    for reward in reversed(rewards):
        gain = 0.1 * reward + 0.97 * gain
        returns.append(gain)
    returns = torch.cat(returns[::-1])
    edge = returns - torch.cat(values)
    edge = (edge - edge.mean()) / (edge.std() + 1e-6)
    return (torch.cat(seen), torch.cat(acts), torch.cat(chances), returns, edge), angle, speed


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, fused=True)
angle = (torch.rand(FLEET, 1) * 2 - 1) * math.pi
speed = torch.zeros(FLEET, 1)
flight = None

for step in range(args.steps):  # the training loop
    if step % args.passes == 0:
        flight, angle, speed = fly(policy, angle, speed)
    seen, acts, chances, returns, edge = flight
    aim, value = policy(seen)
    ratio = (aim.log_prob(acts) - chances).exp()
    surrogate = torch.min(ratio * edge, ratio.clamp(0.8, 1.2) * edge)
    loss = -surrogate.mean() + 0.5 * (value - returns).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(f"step {step}: return {returns.mean().item():.3f}, std {policy.log_std.exp().item():.2f}")
