"""Actor-critic on a herd of carts with poles, simulated all at once as tensors."""

import argparse
import copy

import torch
from torch import nn
from torch.distributions import Categorical


class Herd:
    def __init__(self, size):
        self.state = torch.empty(size, 4).uniform_(-0.05, 0.05)

    def step(self, action):
        x, v, a, w = self.state.unbind(1)
        force = action.float() * 20 - 10
        sin, cos = a.sin(), a.cos()
        pull = (force + 0.05 * w * w * sin) / 1.1
        spin = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        push = pull - 0.05 * spin * cos / 1.1
        state = torch.stack([x + 0.02 * v, v + 0.02 * push, a + 0.02 * w, w + 0.02 * spin], 1)
        fallen = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)
        fresh = torch.empty_like(state).uniform_(-0.05, 0.05)
        self.state = torch.where(fallen[:, None], fresh, state)
        return 1.0 - fallen.float(), fallen


class Agent(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(4, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
        )
        self.heads = nn.Linear(width, 3)

    def forward(self, state):
        out = self.heads(self.trunk(state))
        return Categorical(logits=out[:, :2]), out[:, 2]


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps
torch.manual_seed(8)
herd, agent = Herd(640), Agent()
opt = torch.optim.Adam(agent.parameters(), lr=1e-3, fused=True)
alive = torch.zeros(())
slow = copy.deepcopy(agent).requires_grad_(False)

for step in range(steps):  # the training loop
    policy, value = agent(herd.state)
    action = policy.sample()
    reward, fallen = herd.step(action)
    with torch.no_grad():
        _, following = slow(herd.state)
        goal = reward + 0.97 * following * ~fallen
    advantage = goal - value
    loss = 0.5 * advantage.square().mean() - (policy.log_prob(action) * advantage.detach()).mean()
    loss = loss - 0.01 * policy.entropy().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 19:
        torch._foreach_copy_(list(slow.parameters()), list(agent.parameters()))
    alive.lerp_(reward.mean(), 0.05)
    if (step + 1) % 50 == 0:
        print(f"{step + 1:6d} alive {alive.item():.3f} loss {loss.item():.3f}", flush=True)
