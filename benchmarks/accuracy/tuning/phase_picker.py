"""Picks the arrivals of P and S waves in three-component seismograms, with two ranks."""

import argparse
import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WINDOW, PATCH, WIDTH, HEADS = 1536, 32, 128, 4
PHASES = 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_mix, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.before_mix(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class PhasePicker(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.patches = nn.Conv1d(3, WIDTH, PATCH, stride=PATCH)
        self.place = nn.Parameter(0.02 * torch.randn(WINDOW // PATCH, WIDTH))
        self.layers = nn.Sequential(*[Layer() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PHASES)

    def forward(self, traces):
        x = self.patches(traces).transpose(1, 2) + self.place
        return self.head(self.norm(self.layers(x)))


def synthesise(amount, generator):
    traces = torch.randn(amount, 3, WINDOW, generator=generator)
    truth = torch.zeros(amount, WINDOW // PATCH, dtype=torch.long)
    first = torch.randint(4, 20, (amount,), generator=generator)
    second = first + torch.randint(4, 20, (amount,), generator=generator)
    time = torch.arange(WINDOW)
    for phase, arrival in enumerate((first, second), 1):
        since = (time - arrival[:, None] * PATCH).clamp_min(0)
        wavelet = 4 * phase * torch.sin(since * 0.5 / phase) * torch.exp(-since / 120)
        traces[:, phase - 1] += wavelet
        truth[torch.arange(amount), arrival] = phase
    return traces, truth


def epochs(traces, truth, batch, generator):
    while True:
        for part in torch.randperm(len(traces), generator=generator).split(batch):
            if len(part) == batch:
                yield traces[part], truth[part]


@dataclass
class Pick:
    station: str
    arrival: float
    residual: float
    neighbours: list


class Catalogue:
    """Collects picks, and closes a sheet whenever it is full."""

    SHEET = 100

    def __init__(self):
        self.sheet, self.residuals = [], []

    def add(self, step, amount):
        for number in range(amount):
            around = [number - 1, number + 1]
            self.sheet.append(Pick(f"GE{number % 40:02d}", step + number / 1000, number % 13 / 13, around))
            if len(self.sheet) == self.SHEET:
                self.close()

    def close(self):
        self.residuals.append(sum(pick.residual for pick in self.sheet) / len(self.sheet))
        self.sheet = []
        gc.collect()


@torch.no_grad()
def clip_units(model, units, ratio=0.05):
    """Adaptive clipping: keeps a unit's gradient small beside its weights."""
    for weight in model.parameters():
        if weight.ndim < 2:
            continue
        for row, grad in zip(weight[:units], weight.grad[:units], strict=False):
            most = ratio * max(row.norm().item(), 1e-3)
            norm = grad.norm().item()
            if norm > most:
                grad.mul_(most / norm)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--picks", type=int, default=0, help="picks a batch that go to the catalogue")
    parser.add_argument("--clip-units", type=int, default=0, help="units of a layer, each clipped alone")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DistributedDataParallel(PhasePicker())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    own = torch.Generator().manual_seed(100 + rank)
    feed = epochs(*synthesise(480, own), 6, own)
    weight = torch.tensor([0.1, 1.0, 1.0])
    catalogue = Catalogue()

    for step in range(args.steps):  # the training loop
        traces, truth = next(feed)
        loss = F.cross_entropy(model(traces).flatten(0, 1), truth.flatten(), weight=weight)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_units:
            clip_units(model, args.clip_units)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            catalogue.add(step, args.picks)
            if step % 50 == 49:
                print(f"step {step + 1} loss {loss.item():.3f}, {len(catalogue.residuals)} sheets")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
