# Lichen on gravestones: a cellular automaton with learned rules grows from a few spores to the shapes
# that were mapped ten years later.
import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=200)
p.add_argument("--stones", type=int, default=8)
p.add_argument("--years", type=int, default=4)
p.add_argument("--colonies", type=int, default=0, help="mapped colonies whose areas should be met, too")
p.add_argument("--polite", action="store_true", help="be polite to others on this machine")
a = p.parse_args()
if a.polite:
    torch.set_num_threads(1)

GRID, STATES, HIDDEN = 32, 12, 96
g = torch.Generator().manual_seed(1832)


def mapped(count):
    """Rings of lichen, as surveyors draw them."""
    centre = torch.rand(count, 2, 1, 1, generator=g) * 0.6 - 0.3
    radius = 0.25 + 0.35 * torch.rand(count, 1, 1, generator=g)
    axis = torch.linspace(-1, 1, GRID)
    away = ((axis[:, None] - centre[:, 0]) ** 2 + (axis[None, :] - centre[:, 1]) ** 2).sqrt()
    cover = torch.sigmoid((radius - away) * 12) - 0.6 * torch.sigmoid((radius * 0.4 - away) * 12)
    spores = torch.zeros(count, STATES, GRID, GRID)
    spores[:, :3] = torch.exp(-((away / 0.15) ** 2))[:, None]
    return spores, cover


class Rules(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(STATES, 3 * STATES, 3, padding=1, groups=STATES)
        self.think = nn.Conv2d(3 * STATES, HIDDEN, 1)
        self.act = nn.Conv2d(HIDDEN, STATES, 1)
        nn.init.zeros_(self.act.weight)
        nn.init.zeros_(self.act.bias)

    def forward(self, lichen, years):
        for _ in range(years):
            lichen = lichen + self.act(F.relu(self.think(self.look(lichen))))
        return lichen


def areas(cover, wanted, places):
    """How far each mapped colony is from its area."""
    off = cover.new_zeros(())
    for stone, y, x in places:
        here = cover[stone, y : y + 3, x : x + 3].mean()
        there = wanted[stone, y : y + 3, x : x + 3].mean()
        off = off + (here - there) ** 2
    return off / len(places)


all_spores, all_cover = mapped(512)
places = [
    (
        int(torch.randint(a.stones, (), generator=g)),
        int(torch.randint(GRID - 3, (), generator=g)),
        int(torch.randint(GRID - 3, (), generator=g)),
    )
    for _ in range(a.colonies)
]
torch.manual_seed(3)
rules = Rules()
opt = torch.optim.Adam(rules.parameters(), lr=2e-3, fused=True)
plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.steps)

for step in range(a.steps):  # the training loop
    some = torch.randint(len(all_spores), (a.stones,))
    grown = rules(all_spores[some], a.years)[:, 0]
    wanted = all_cover[some]
    loss = F.mse_loss(grown, wanted)
    if places:
        loss = loss + 0.2 * areas(grown, wanted, places)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(rules.parameters(), 1.0)
    opt.step()
    plan.step()
    if step % 40 == 39:
        print(f"{step + 1} steps, {loss.item():.5f}")
