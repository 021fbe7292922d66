# Pursuit among pillars: one policy plays hunter and hare in 512 games at once, and learns from both
# sides (PPO). After each round of 16 moves come four passes over what was seen.
import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=203, help="updates of the policy")
STEPS = parser.parse_args().steps

GAMES, MOVES, PASSES, CHUNK, WIDTH = 512, 16, 4, 1024, 288
PLAYERS = 2 * GAMES
GAMMA, LAMBDA, CLIP, ENTROPY = 0.98, 0.95, 0.2, 0.01
PILLARS = 8
torch.manual_seed(41)

angle = torch.arange(8) * math.pi / 4
THRUST = torch.cat([torch.stack([angle.cos(), angle.sin()], 1), torch.zeros(1, 2)])
pillar = torch.rand(PILLARS, 2) * 1.6 - 0.8
sign = torch.tensor([-1.0, 1.0]).repeat_interleave(GAMES)  # the hunter wants to be near, the hare does not
place = torch.rand(PLAYERS, 2) * 2 - 1
speed = torch.zeros(PLAYERS, 2)
clock = torch.randint(60, (GAMES,))


def other(x):
    return x.roll(GAMES, 0)


def look():
    to_pillars = (pillar - place.unsqueeze(1)).flatten(1)
    left = clock.repeat(2).unsqueeze(1) / 60
    return torch.cat(
        [place, speed, other(place) - place, other(speed) - speed, to_pillars, left, sign.unsqueeze(1)], 1
    )


def move(action):
    """All games by one move; those that ended start anew."""
    global place, speed, clock
    speed = 0.85 * speed + 0.04 * THRUST[action]
    to_pillars = place.unsqueeze(1) - pillar
    near = to_pillars.square().sum(2, keepdim=True)
    speed = speed + 0.002 * (to_pillars / (near + 0.02)).sum(1)
    place = (place + speed).clamp(-1, 1)
    clock = clock + 1
    apart = (place[:GAMES] - place[GAMES:]).norm(dim=1)
    caught = apart < 0.08
    reward = sign * (apart - 5 * caught.float()).repeat(2)
    over = (caught | (clock >= 60)).repeat(2)
    fresh = over.unsqueeze(1)
    place = torch.where(fresh, torch.rand(PLAYERS, 2) * 2 - 1, place)
    speed = speed.masked_fill(fresh, 0.0)
    clock = clock.masked_fill(over[:GAMES], 0)
    return reward, over.float()


class Player(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(seen, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, len(THRUST) + 1),
        )

    def forward(self, seen):
        out = self.body(seen)
        return F.log_softmax(out[:, :-1], 1), out[:, -1]


@torch.no_grad()
def play(player, kept):
    """Fills the tensors of `kept` with one round, and returns advantages and returns."""
    seen = look()
    for t in range(MOVES):
        chances, value = player(seen)
        action = torch.multinomial(chances.exp(), 1)
        kept["seen"][t], kept["value"][t], kept["action"][t] = seen, value, action
        kept["chance"][t] = chances.gather(1, action).squeeze(1)
        kept["reward"][t], kept["over"][t] = move(action.squeeze(1))
        seen = look()
    later, gain = player(seen)[1], torch.zeros(PLAYERS)
    gains = torch.empty(MOVES, PLAYERS)
    for t in reversed(range(MOVES)):
        on = 1 - kept["over"][t]
        surprise = kept["reward"][t] + GAMMA * on * later - kept["value"][t]
        gain = surprise + GAMMA * LAMBDA * on * gain
        gains[t], later = gain, kept["value"][t]
    wanted = gains + kept["value"]
    return ((gains - gains.mean()) / gains.std()).flatten(), wanted.flatten()


def chunks(kept, gains, wanted):
    flat = [
        kept["seen"].flatten(0, 1),
        kept["action"].flatten(0, 1),
        kept["chance"].flatten(),
        gains,
        wanted,
    ]
    for _ in range(PASSES):
        for rows in torch.randperm(MOVES * PLAYERS).split(CHUNK):
            yield [part.index_select(0, rows) for part in flat]


def rounds(player):
    sizes = {
        "seen": (look().shape[1],),
        "action": (1,),
        "chance": (),
        "value": (),
        "reward": (),
        "over": (),
    }
    kept = {name: torch.empty(MOVES, PLAYERS, *size) for name, size in sizes.items()}
    kept["action"] = kept["action"].long()
    while True:
        yield from chunks(kept, *play(player, kept))


player = Player(look().shape[1])
optimizer = torch.optim.Adam(player.parameters(), lr=3e-4, eps=1e-5, fused=True)
stream = rounds(player)
errors = torch.zeros(STEPS)

for step in range(STEPS):  # the training loop
    seen, action, chance, gain, wanted = next(stream)
    chances, value = player(seen)
    ratio = (chances.gather(1, action).squeeze(1) - chance).exp()
    policy = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    spread = -(chances.exp() * chances).sum(1).mean()
    error = F.mse_loss(value, wanted)
    optimizer.zero_grad()
    (policy + 0.5 * error - ENTROPY * spread).backward()
    nn.utils.clip_grad_norm_(player.parameters(), 0.5)
    optimizer.step()
    errors[step] = error.detach()

print(f"value error {errors[:32].mean():.3f}, in the end {errors[-32:].mean():.3f}")
