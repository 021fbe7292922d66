"""Tells four kinds of whale calls apart in hydrophone recordings."""

import argparse
import glob
import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RATE, WINDOW = 4000, 4096
KINDS = ["upcall", "moan", "click", "song"]


def synthesise(folder, recordings=12, seconds=60, seed=5):
    """Recordings of two sites, named so that they sort by date: coast, deep, coast, deep, ..."""
    rng = np.random.default_rng(seed)
    n = RATE * seconds
    t = np.arange(WINDOW) / RATE
    for day in range(recordings):
        site = "deep" if day % 2 else "coast"
        sound = rng.normal(0, 0.3, n).astype(np.float32)
        label = rng.integers(0, 4, n // WINDOW)
        for i, kind in enumerate(label):
            f0 = rng.uniform(80, 300)
            call = [
                np.sin(6.28 * (f0 * t + 200 * t * t)),
                np.sin(6.28 * f0 * t) * np.sin(3 * t),
                (np.sin(6.28 * 6 * t) > 0.99) * 2.0,
                np.sin(6.28 * f0 * t + 5 * np.sin(20 * t)),
            ][kind]
            sound[i * WINDOW : (i + 1) * WINDOW] += call.astype(np.float32) * rng.uniform(0.3, 1)
        np.savez(os.path.join(folder, f"day{day:03d}_{site}.npz"), sound=sound, label=label)


class Hydrophones(IterableDataset):
    """Endless batches of windows. Each worker reads its own recordings."""

    def __init__(self, folder, batch, echoes=0, ships=0, seed=0):
        self.files = sorted(glob.glob(os.path.join(folder, "*.npz")))
        self.batch, self.echoes, self.ships, self.seed = batch, echoes, ships, seed

    def reverberate(self, x, rng):
        """the call by way of `echoes` paths over surface and bottom, each with its own filter"""
        spectrum = np.fft.rfft(x, 2 * WINDOW)
        freq = np.arange(spectrum.shape[1]) / (2 * WINDOW)
        out = x.copy()
        for order in range(1, self.echoes + 1):
            delay = rng.uniform(5, 900, (len(x), 1))
            path = spectrum * np.exp(-2j * np.pi * freq * delay - 3 * freq)
            out += np.fft.irfft(path)[:, :WINDOW].astype(np.float32) * 0.5**order
        return out

    def remove_ships(self, x, templates):
        """The lane crosses the deep site: find the ship's signature that fits best and take it away."""
        spectrum = np.fft.rfft(x)
        best, gain, where = np.zeros(len(x)), np.zeros(len(x)), np.zeros(len(x), int)
        for k, template in enumerate(templates):
            match = np.fft.irfft(spectrum * np.conj(template))
            peak = match.max(1)
            better = peak > best
            best[better], gain[better], where[better] = peak[better], peak[better] / WINDOW, k
        fit = np.fft.irfft(templates[where])
        return (x - 0.1 * gain[:, None] * fit).astype(np.float32)

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rng = np.random.default_rng(self.seed + worker)
        shards = []
        for name in self.files[worker::workers]:
            with np.load(name) as f:
                shards.append((name, f["sound"], f["label"]))
        templates = np.fft.rfft(rng.normal(0, 1, (max(self.ships, 1), WINDOW)).cumsum(1) / 64)
        while True:
            name, sound, label = shards[rng.integers(len(shards))]
            which = rng.integers(0, len(label), self.batch)
            x = sound[: len(label) * WINDOW].reshape(-1, WINDOW)[which]
            if self.ships and "deep" in name:
                x = self.remove_ships(x, templates)
            if self.echoes:
                x = self.reverberate(x, rng)
            yield torch.from_numpy(x), torch.from_numpy(label[which])


class Bands(nn.Module):
    """Learned filters, grouped into bands; each band's responses can be decorrelated (ZCA)."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(1, 64, 64, stride=16)
        self.register_buffer("zca", torch.eye(64))

    def forward(self, x):
        x = self.filters(x[:, None])
        return torch.einsum("ij,bjt->bit", self.zca, x)

    @torch.no_grad()
    def refit(self, sound, looks):
        """new decorrelation from `looks` stretches of sound; the median of their bases is robust to clicks"""
        x = self.filters(sound[:, None])
        found = []
        for look in range(looks):
            part = x[look % len(x)]
            lagged = torch.cat([part[:, lag : lag + 200] for lag in (0, 8, 16)])
            cov = lagged @ lagged.T / 200
            value, vector = torch.linalg.eigh(cov + 0.1 * torch.eye(len(cov)))
            found.append((vector * value.clamp_min(0.1).rsqrt()) @ vector.T)
        whole = torch.stack(found).mean(0)[:64, :64]
        self.zca.lerp_(whole / whole.diagonal().mean(), 0.1)


def build(bands):
    layers, width = [bands], 64
    for out in (64, 64, 96):
        layers += [
            nn.Conv1d(width, out, 5, padding=2, bias=False),
            nn.BatchNorm1d(out),
            nn.SiLU(),
            nn.MaxPool1d(2),
        ]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, len(KINDS)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--echoes", type=int, default=0, help="reflected paths for each window")
    ap.add_argument("--ships", type=int, default=0, help="ship signatures looked for at the deep site")
    ap.add_argument(
        "--looks", type=int, default=0, help="decorrelate the filters, refitted from so many looks"
    )
    args = ap.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other CPU is for the workers

    with tempfile.TemporaryDirectory() as folder:
        synthesise(folder)
        data = Hydrophones(folder, args.batch, args.echoes, args.ships)
        loader = iter(DataLoader(data, batch_size=None, num_workers=args.workers, prefetch_factor=4))
        bands = Bands()
        net = build(bands)
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        right = torch.zeros(())
        for step in range(args.steps):  # the training loop
            sound, kind = next(loader)
            if args.looks and step % 10 == 9:
                bands.refit(sound, args.looks)
            out = net(sound)
            loss = nn.functional.cross_entropy(out, kind, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
            right += (out.detach().argmax(1) == kind).float().mean()
            if step % 25 == 24:
                print(f"step {step + 1:4d}  loss {loss.item():.3f}  right {right.item() / 25:.2f}")
                right.zero_()


if __name__ == "__main__":
    main()
