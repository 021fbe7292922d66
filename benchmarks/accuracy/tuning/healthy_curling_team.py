"""Curling against the wall clock: an actor and a critic throw 512 stones at a time on as many sheets of ice.

The ice is simulated with tensors, all sheets at once, in the training loop; no stone waits for another.
"""

import argparse

import torch
from torch import nn
from torch.distributions import Normal


class Ice:
    """A stone slows down, curls to the side and should end in the house, at (1, 0)."""

    def __init__(self, sheets):
        self.sheets = sheets

    def fresh(self):
        grip = 0.7 + 0.2 * torch.rand(self.sheets, 1)
        wind = 0.1 * torch.randn(self.sheets, 1)
        return torch.cat([grip, wind, torch.zeros(self.sheets, 2)], 1)

    @staticmethod
    def slide(state, push):
        grip, wind, place = state[:, :1], state[:, 1:2], state[:, 2:]
        place = place + 0.4 * grip * torch.tanh(push) + torch.cat([torch.zeros_like(wind), 0.2 * wind], 1)
        target = place.new_tensor([1.0, 0.0])
        return torch.cat([grip, wind, place], 1), -(place - target).square().sum(1)


class Team(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.spread = nn.Parameter(torch.full((2,), -1.0))

    def policy(self, state):
        return Normal(self.actor(state), self.spread.exp())


def play(team, ice, pushes):
    """Plays an end without gradients; the update goes over all of it at once."""
    states, acts, gains = [], [], []
    with torch.no_grad():
        state = ice.fresh()
        for _ in range(pushes):
            act = team.policy(state).sample()
            states.append(state)
            acts.append(act)
            state, gain = ice.slide(state, act)
            gains.append(gain)
    reward = torch.stack(gains)
    returns = reward.flip(0).cumsum(0).flip(0) / pushes
    return torch.cat(states), torch.cat(acts), returns.flatten()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sheets", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(14)
    ice, team = Ice(args.sheets), Team(96)
    optimizer = torch.optim.Adam(team.parameters(), lr=2e-3, fused=True)
    for step in range(args.steps):  # the training loop
        states, acts, returns = play(team, ice, pushes=4)
        policy, value = team.policy(states), team.critic(states).squeeze(1)
        gain = returns - value.detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        loss = -(policy.log_prob(acts).sum(1) * gain).mean() + 0.5 * (value - returns).square().mean()
        loss = loss - 0.003 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"end {step}: mean return {returns.mean().item():.3f}")


if __name__ == "__main__":
    main()
