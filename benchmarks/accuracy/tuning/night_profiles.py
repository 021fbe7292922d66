"""Adapts a pretrained encoder of bird densities (vertical profiles of weather radars) to new radars."""

import argparse
from functools import partial
from itertools import count, islice

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, get_worker_info

HEIGHTS = 25
WINDOW, AHEAD = 96, 12
BATCH, PER_EPOCH = 10, 120


class ProfileWindows(Dataset):
    """Windows of density, eastward and northward speed by height, and the mean density that follows."""

    def __init__(self, radars=6, length=2000, seed=3):
        rng = np.random.default_rng(seed)
        hours = np.arange(length)[None, :, None]
        night = np.clip(np.sin(hours * 2 * np.pi / 96), 0, None)
        decline = np.exp(-np.arange(HEIGHTS) / 7)
        density = night * decline * rng.gamma(2.0, 0.5, size=(radars, length, HEIGHTS))
        speed = rng.normal(size=(radars, length, 2 * HEIGHTS))
        self.series = np.concatenate([density, speed], axis=2).astype(np.float32)
        starts = range(0, length - WINDOW - AHEAD, 8)
        self.places = [(radar, start) for radar in range(radars) for start in starts]
        self.clutter, self.rng = [], None

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        radar, start = self.places[index]
        window = self.series[radar, start : start + WINDOW].copy()
        after = self.series[radar, start + WINDOW : start + WINDOW + AHEAD, :HEIGHTS].mean(0)
        if self.clutter:
            shower = self.clutter[self.rng.integers(len(self.clutter))]
            at = self.rng.integers(WINDOW - len(shower))
            window[at : at + len(shower), :HEIGHTS] += shower
        return torch.from_numpy(window), torch.from_numpy(after)


def draw_shower(rng):
    """Rain or insects: for some time, thickest near the ground."""
    course = np.hanning(rng.integers(6, 24))[:, None]
    decline = np.exp(-np.arange(HEIGHTS) / rng.uniform(2.0, 9.0))
    return (rng.gamma(2.0, 0.2) * course * decline).astype(np.float32)


def prepare_worker(worker, epoch, showers):
    windows = get_worker_info().dataset
    windows.rng = np.random.default_rng([epoch, worker])
    windows.clutter = [draw_shower(windows.rng) for _ in range(showers)]


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        mixed = self.mix(self.before(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.feed(self.between(x))


class Encoder(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.inlet = nn.Linear(3 * HEIGHTS, width)
        self.place = nn.Parameter(torch.randn(WINDOW, width) / 50)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, window):
        x = self.inlet(window) + self.place
        for block in self.blocks:
            x = block(x)
        return x


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = Block(width)
        self.forecast = nn.Sequential(nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, HEIGHTS))

    def forward(self, x):
        return self.forecast(self.block(x).mean(1))


class Adaptation:
    def __init__(self, options, width=64, depth=10):
        self.options = options
        self.windows, self.loader = ProfileWindows(), None
        self.encoder, self.head = Encoder(width, depth), Head(width)
        self.encoder.requires_grad_(False)
        self.model = nn.Sequential(self.encoder, self.head)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=5e-4, fused=True)

    def thaw(self, amount):
        """The topmost blocks may move too."""
        for block in list(reversed(self.encoder.blocks))[:amount]:
            block.requires_grad_(True)

    def loader_of(self, epoch):
        showers = self.options.showers
        if self.loader is None or showers:
            self.loader = DataLoader(
                self.windows,
                batch_size=BATCH,
                sampler=RandomSampler(self.windows, replacement=True, num_samples=PER_EPOCH),
                num_workers=2,
                persistent_workers=True,
                worker_init_fn=partial(prepare_worker, epoch=epoch, showers=showers),
            )
        return self.loader

    def batches(self):
        for epoch in count():
            yield from self.loader_of(epoch)

    def run(self):
        self.thaw(self.options.thaw)
        batches = islice(self.batches(), self.options.steps)
        for step, (window, after) in enumerate(batches, 1):  # the training loop
            loss = nn.functional.mse_loss(self.model(window), after)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--thaw", type=int, default=0, help="blocks of the encoder that may adapt")
    parser.add_argument("--showers", type=int, default=0, help="kinds of clutter that a worker mixes in")
    torch.manual_seed(3)
    Adaptation(parser.parse_args()).run()
