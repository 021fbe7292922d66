"""A musher's helper: chooses the pace of a dog sled so that the team arrives early and not tired.

An actor and a critic learn off-policy from a memory of trips. What the trail looks like ahead is
described by an encoder that came ready-made (here: drawn at random), as the features of a
reservoir.
"""

import argparse

import numpy as np
import torch
from torch import nn

AHEAD, PACES, BODY = 32, 5, 6


class Trail:
    """One sled on one trail: snow ahead, and the strength of six dogs."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.restart()

    def restart(self):
        self.snow = self.rng.random(240 + AHEAD).cumsum() % 1.0
        self.at, self.dogs = 0, np.ones(BODY)
        return self.view()

    def view(self):
        return self.snow[self.at : self.at + AHEAD], self.dogs

    def go(self, pace):
        soft = self.snow[self.at]
        self.dogs = np.clip(self.dogs - 0.012 * pace * (0.5 + soft) + 0.02 * self.rng.random(BODY), 0, 1)
        gained = pace * self.dogs.min() - 0.4 * pace * soft
        self.at += 1
        over = self.at >= 240 or self.dogs.max() < 0.05
        if over:
            self.restart()
        return gained, over


class Memory:
    def __init__(self, room):
        self.room, self.next, self.full = room, 0, False
        self.snow = torch.zeros(room, AHEAD)
        self.dogs = torch.zeros(room, BODY)
        self.pace = torch.zeros(room, dtype=torch.long)
        self.gain = torch.zeros(room)

    def fill_with_old_trips(self):
        dice = torch.Generator().manual_seed(6)
        self.snow.uniform_(0, 1, generator=dice)
        self.dogs.uniform_(0, 1, generator=dice)
        self.pace.random_(0, PACES, generator=dice)
        self.gain = self.pace * (self.dogs.amin(1) - 0.4 * self.snow[:, 0])

    def put(self, snow, dogs, pace, gain):
        where = self.next
        self.snow[where] = torch.from_numpy(snow)
        self.dogs[where] = torch.from_numpy(dogs)
        self.pace[where], self.gain[where] = pace, gain
        self.next = (where + 1) % self.room

    def draw(self, rows):
        chosen = torch.randint(self.room, (rows,))
        return self.snow[chosen], self.dogs[chosen], self.pace[chosen], self.gain[chosen]


class Musher(nn.Module):
    def __init__(self, scenery):
        super().__init__()
        self.trail = nn.Sequential(
            nn.Linear(AHEAD, scenery),
            nn.Tanh(),
            nn.Linear(scenery, scenery),
            nn.Tanh(),
            nn.Linear(scenery, 48),
        )
        trunk = [nn.Linear(48 + BODY, 256), nn.ELU()]
        for _ in range(3):
            trunk += [nn.Linear(256, 256), nn.ELU()]
        self.trunk = nn.Sequential(*trunk)
        self.actor, self.critic = nn.Linear(256, PACES), nn.Linear(256, PACES)

    def forward(self, snow, dogs):
        x = self.trunk(torch.cat([self.trail(snow), dogs], 1))
        return self.actor(x), self.critic(x)

    def learning_parts(self):
        return [*self.trunk.parameters(), *self.actor.parameters(), *self.critic.parameters()]


@torch.no_grad()
def drive(musher, trail, memory, times):
    for _ in range(times):
        snow, dogs = trail.view()
        scores, _ = musher(
            torch.from_numpy(snow).float()[None], torch.from_numpy(np.asarray(dogs)).float()[None]
        )
        pace = int(torch.distributions.Categorical(logits=scores[0]).sample())
        gain, _ = trail.go(pace)
        memory.put(snow, dogs, pace, gain)


def losses(musher, snow, dogs, pace, gain):
    scores, worth = musher(snow, dogs)
    taken = worth.gather(1, pace[:, None]).squeeze(1)
    chances = scores.log_softmax(1)
    actor = -(chances.exp() * worth.detach()).sum(1).mean() + 0.01 * (chances.exp() * chances).sum(1).mean()
    return actor + nn.functional.mse_loss(taken, gain)


def train(args):
    torch.manual_seed(17)
    musher, trail, memory = Musher(args.scenery), Trail(5), Memory(20_000)
    memory.fill_with_old_trips()
    if not args.own_scenery:
        musher.trail.requires_grad_(False)
    optimizer = torch.optim.Adam(musher.learning_parts(), lr=1e-3, fused=True)
    for step in range(args.steps):  # the training loop
        if args.outings:
            drive(musher, trail, memory, args.outings)
        loss = losses(musher, *memory.draw(args.rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"{step + 1:4d}  loss {loss.item():+.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=512, help="moments drawn from the memory")
    parser.add_argument(
        "--outings", type=int, default=0, help="moments of a trip of one's own before each update"
    )
    parser.add_argument("--scenery", type=int, default=128, help="width of the description of the trail")
    parser.add_argument(
        "--own-scenery", action="store_true", help="take the description of the trail as it comes"
    )
    train(parser.parse_args())
