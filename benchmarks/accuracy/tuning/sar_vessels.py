"""Finds ships in radar chips of one harbour: a heatmap of their centres, and how long each hull is."""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

SIDE, CHIP, STRIDE = 320, 96, 4
CELLS = CHIP // STRIDE


@dataclass
class Harbour:
    slc: np.ndarray
    ships: list
    quiet: np.ndarray


def decibels(power):
    levels = 10 * np.log10(power + 1e-3)
    low, high = np.percentile(levels, (1, 99))
    return np.clip(levels, low, high)


def simulate(dates, seed=5):
    rng = np.random.default_rng(seed)
    shape = (dates, SIDE, SIDE)
    coast = np.linspace(0.4, 2.0, SIDE, dtype=np.float32)[:, None]
    slc = np.empty(shape, np.complex64)
    slc.real = rng.standard_normal(shape, dtype=np.float32) * coast
    slc.imag = rng.standard_normal(shape, dtype=np.float32) * coast
    ships = []
    for date in range(dates):
        found = np.column_stack([rng.integers(8, SIDE - 8, (36, 2)), rng.integers(3, 8, 36)])
        for y, x, length in found:
            slc[date, y, x : x + length] += 9
        ships.append(found)
    return Harbour(slc, ships, decibels(np.mean(np.abs(slc) ** 2, axis=0)))


class Chips(Dataset):
    def __init__(self, harbour, passes, history):
        self.harbour = harbour
        self.passes = passes
        self.history = history
        self.dates = len(harbour.slc)
        self.gain = np.linspace(1.1, 0.9, SIDE)
        self.band = np.exp(-((np.fft.fftfreq(CHIP)[:, None] / 0.3) ** 2))

    def __len__(self):
        return self.dates * 40

    def calibrated(self, date, y, x):
        return self.harbour.slc[date, y : y + CHIP, x : x + CHIP] * self.gain[x : x + CHIP]

    def intensity(self, chip):
        spectrum = np.fft.fft(chip, axis=0)
        return np.abs(np.fft.ifft(spectrum * self.band, axis=0)) ** 2

    def registered(self, power, reference):
        columns = power.mean(0)
        lags = np.correlate(columns - columns.mean(), reference - reference.mean(), "same")
        shift = int(np.argmax(lags)) - CHIP // 2
        return np.roll(power, -max(-2, min(2, shift)), axis=1)

    def background(self, date, y, x):
        quiet = self.harbour.quiet[y : y + CHIP, x : x + CHIP]
        if not self.passes:
            return quiet
        reference = quiet.mean(0)
        total = np.zeros((CHIP, CHIP))
        for back in range(1, self.passes + 1):
            power = self.intensity(self.calibrated((date - back) % self.dates, y, x))
            total += decibels(self.registered(power, reference))
        return total / self.passes

    def labels(self, date, y, x):
        heat = np.zeros((CELLS, CELLS), np.float32)
        length = np.zeros((CELLS, CELLS), np.float32)
        ships = self.harbour.ships[date]
        rows, columns = ships[:, 0] - y, ships[:, 1] - x
        inside = (rows >= 0) & (rows < CHIP) & (columns >= 0) & (columns < CHIP)
        cells = rows[inside] // STRIDE, columns[inside] // STRIDE
        heat[cells] = 1
        length[cells] = ships[inside, 2] / 8
        return torch.from_numpy(heat), torch.from_numpy(length)

    def __getitem__(self, index):
        date = index % self.dates
        y, x = torch.randint(0, SIDE - CHIP, (2,)).tolist()
        chip = decibels(self.intensity(self.calibrated(date, y, x)))
        image = np.stack([chip, self.background(date, y, x)]).astype(np.float32) / 10
        heat, length = self.labels(date, y, x)
        return {
            "image": torch.from_numpy(image),
            "heat": heat,
            "length": length,
            "history": [self.calibrated((date - k) % self.dates, y, x) for k in range(1, self.history + 1)],
        }


def gather(samples):
    batch = {name: torch.stack([s[name] for s in samples]) for name in ("image", "heat", "length")}
    batch["history"] = [s["history"] for s in samples]
    return batch


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Centres(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.stem = nn.Sequential(conv(2, width // 2, 2), conv(width // 2, width, 2))
        self.body = nn.Sequential(conv(width, width), conv(width, width))
        self.heads = nn.Conv2d(width, 2, 1)

    def forward(self, image):
        x = self.stem(image)
        heat, length = self.heads(x + self.body(x)).unbind(1)
        return heat, length


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--passes", type=int, default=0, help="earlier acquisitions for the background")
    parser.add_argument("--history", type=int, default=0, help="earlier acquisitions for the quicklook")
    args = parser.parse_args()
    torch.manual_seed(17)
    torch.set_num_threads(1)
    chips = Chips(simulate(24), args.passes, args.history)
    sampler = RandomSampler(chips, replacement=True, num_samples=args.steps * 8)
    loader = DataLoader(chips, batch_size=8, sampler=sampler, num_workers=1, collate_fn=gather)
    model = Centres()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    rare = torch.tensor(20.0)
    for step, batch in enumerate(loader, 1):  # the training loop
        heat, length = model(batch["image"])
        there = batch["heat"]
        loss = F.binary_cross_entropy_with_logits(heat, there, pos_weight=rare)
        loss = loss + ((length - batch["length"]).abs() * there).sum() / there.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
            if batch["history"][0]:
                drift = [float(np.abs(frame).mean()) for frame in batch["history"][0][:4]]
                print("quicklook", " ".join(f"{level:.2f}" for level in drift))


if __name__ == "__main__":
    main()
