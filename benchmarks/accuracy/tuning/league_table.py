# Football: goals of both sides from the form of the teams. (Notebook -> script, 14 May)
import argparse
import random

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
ap.add_argument("--elo", type=int, default=0, help="replay this many matches per step for the Elo table")
ap.add_argument(
    "--timeline", type=int, default=0, help="record this many of every 16 steps for the timeline"
)
ap.add_argument("--line-ups", type=int, default=0, help="players per match that come along with the batch")
args = ap.parse_args()

random.seed(11)
np.random.seed(11)
torch.manual_seed(11)

TEAMS, FORM, BATCH, MATCHES = 90, 160, 512, 12000

# %% data
home = np.random.randint(0, TEAMS, MATCHES)
away = (home + np.random.randint(1, TEAMS, MATCHES)) % TEAMS
strength = np.random.randn(TEAMS)
form = torch.from_numpy(
    (np.random.randn(MATCHES, FORM) + (strength[home] - strength[away])[:, None] * 0.3).astype(np.float32)
)
goals = torch.from_numpy(
    np.random.poisson(np.exp(0.3 + 0.2 * np.stack([strength[home], strength[away]], 1))).astype(np.float32)
)
sides = torch.from_numpy(np.stack([home, away], 1))


class Season(Dataset):
    """Matches with their players (only with --line-ups)."""

    def __init__(self, players):
        names = [f"player {i}" for i in range(2000)]
        self.squads = [
            [
                {"name": random.choice(names), "minutes": random.randint(1, 90), "rating": random.random()}
                for _ in range(players)
            ]
            for _ in range(300)
        ]

    def __len__(self):
        return 1_000_000

    def __getitems__(self, indices):
        rows = torch.tensor(indices) % MATCHES
        return form[rows], sides[rows], goals[rows], [self.squads[i % 300] for i in indices]


def batches():
    if args.line_ups:
        for x, s, y, _squads in DataLoader(
            Season(args.line_ups), batch_size=BATCH, num_workers=1, collate_fn=lambda b: b
        ):
            yield x, s, y
    while True:
        rows = torch.randint(0, MATCHES, (BATCH,))
        yield form[rows], sides[rows], goals[rows]


# %% model
class Net(torch.nn.Module):
    def __init__(self, w=384):
        super().__init__()
        self.team = torch.nn.Embedding(TEAMS, 48)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(FORM + 96, w),
            torch.nn.SiLU(),
            torch.nn.Linear(w, w),
            torch.nn.SiLU(),
            torch.nn.Linear(w, w),
            torch.nn.SiLU(),
            torch.nn.Linear(w, w),
            torch.nn.SiLU(),
            torch.nn.Linear(w, 2),
        )

    def forward(self, x, s):
        return self.body(torch.cat([x, self.team(s).flatten(1)], 1))


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=args.steps + 1)
poisson = torch.nn.PoissonNLLLoss()

# %% the Elo table beside it, for comparison
table = dict.fromkeys(range(TEAMS), 1500.0)
fixtures = list(zip(home.tolist(), away.tolist(), goals[:, 0].tolist(), goals[:, 1].tolist(), strict=False))


def replay(start, count):
    for i in range(start, start + count):
        h, a, gh, ga = fixtures[i % MATCHES]
        expected = 1.0 / (1.0 + 10 ** ((table[a] - table[h] - 60) / 400))
        result = 1.0 if gh > ga else 0.5 if gh == ga else 0.0
        change = 18 * (result - expected) * max(1.0, abs(gh - ga) ** 0.5)
        table[h] += change
        table[a] -= change


recorder = None
if args.timeline:
    recorder = profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=16 - min(args.timeline, 15), active=min(args.timeline, 15)),
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
    )
    recorder.start()

# %% fit
source = batches()
total = torch.zeros(())
for step in range(args.steps):  # the training loop
    x, s, y = next(source)
    opt.zero_grad()
    loss = poisson(net(x, s), y)
    loss.backward()
    opt.step()
    sched.step()
    total += loss.detach()
    if args.elo:
        replay(step * args.elo, args.elo)
    if recorder is not None:
        recorder.step()
    if step % 50 == 49:
        best = max(table, key=table.get)
        print(f"{step + 1}: nll {total.item() / 50:.4f}, first in the table: team {best}")
        total.zero_()

if recorder is not None:
    recorder.stop()
print("finished")
