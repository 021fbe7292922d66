"""Learn to flip: an actor and a critic at 256 simulated pinball tables, all of them tensors."""

import argparse

import torch
from torch import nn
from torch.distributions import Categorical

TABLES, HORIZON, STATE, MOVES = 256, 6, 10, 4


class Tables:
    """Balls with place and speed, bumpers, and two flippers which push what is near."""

    def __init__(self):
        self.ball = torch.rand(TABLES, 4) * 2 - 1
        self.bumpers = torch.rand(3, 2) * 2 - 1

    @property
    def seen(self):
        places = self.ball[:, None, :2] - self.bumpers
        return torch.cat([self.ball, places.flatten(1)], 1)

    def move(self, flips):
        x, v = self.ball[:, :2], self.ball[:, 2:]
        low = (x[:, 1] < -0.6).float()
        push = torch.stack([(flips == 1).float() - (flips == 2).float(), (flips > 0).float()], 1)
        v = 0.98 * v + 0.3 * low[:, None] * push
        v[:, 1] -= 0.04
        near = ((x[:, None] - self.bumpers).square().sum(2) < 0.05).float().sum(1)
        x = x + 0.1 * v
        lost = x[:, 1] < -1.2
        x = torch.where(lost[:, None], torch.rand_like(x), x)
        v = torch.where(x.abs() > 1, -v, v)
        self.ball = torch.cat([x.clamp(-1.3, 1), v], 1)
        return near - 2 * lost.float()


class Player(nn.Module):
    def __init__(self, width=192):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, MOVES), nn.Linear(width, 1)

    def forward(self, seen):
        thought = self.body(seen)
        return Categorical(logits=self.actor(thought), validate_args=False), self.critic(thought)[..., 0]


class Wonder:
    """Pays for being where no ball was before."""

    def __init__(self, marks):
        self.marks = marks
        self.places = torch.empty(0, STATE)

    def pay(self, seen):
        """Half the distance to the nearest place known; then some of the new ones are marked."""
        bonus = torch.zeros(len(seen))
        if len(self.places):
            bonus = 0.5 * torch.cdist(seen, self.places).amin(1)
        self.places = torch.cat([self.places, seen[: self.marks]])
        return bonus


def returns_of(rewards, last, discount=0.97):
    out = []
    for reward in reversed(rewards):
        last = reward + discount * last
        out.append(last)
    return torch.stack(out[::-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--wonder", type=int, default=0, help="places that are marked in each round")
    parser.add_argument("--hands", type=int, default=0, help="hands that torch may use")
    args = parser.parse_args()
    if args.hands:
        torch.set_num_threads(args.hands)
    torch.manual_seed(40)

    tables, player = Tables(), Player()
    optimizer = torch.optim.Adam(player.parameters(), lr=5e-4, fused=True)
    wonder = Wonder(args.wonder) if args.wonder else None

    for step in range(args.steps):  # the training loop
        states, flips, rewards = [], [], []
        with torch.no_grad():
            for _ in range(HORIZON):
                seen = tables.seen
                flip = player(seen)[0].sample()
                states.append(seen)
                flips.append(flip)
                rewards.append(tables.move(flip))
            if wonder:
                rewards[-1] += wonder.pay(tables.seen)
            goal = returns_of(rewards, player(tables.seen)[1])
        choice, value = player(torch.stack(states))
        better = goal - value
        gain = choice.log_prob(torch.stack(flips)) * better.detach()
        loss = better.square().mean() - gain.mean() - 0.01 * choice.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"round {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
