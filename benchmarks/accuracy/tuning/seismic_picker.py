"""Trains a picker of P and S onsets on three-component seismograms: a small U-Net over time."""

import argparse
import gzip
import io
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, get_worker_info

RATE = 100.0
WINDOW = 1280
BATCH = 16
KURTOSIS = 100
SAMPLES = np.arange(WINDOW)
FREQUENCIES = np.fft.rfftfreq(WINDOW, 1 / RATE)


def make_catalogue(rng, events):
    """Returns events that begin with their P wave, and the delays of their S waves in samples."""
    time = np.arange(WINDOW) / RATE
    delays = rng.integers(80, 420, events)
    waves = np.zeros((events, 3, WINDOW), dtype=np.float32)
    for wave, delay in zip(waves, delays, strict=False):
        coda = rng.standard_normal((3, WINDOW))
        wave += 0.4 * coda * np.exp(-time / 0.8)
        wave[:, delay:] += (coda[::-1] * np.exp(-time / 1.6))[:, : WINDOW - delay]
    return waves, delays


def make_noise(rng, traces):
    noise = rng.standard_normal((traces, 3, 4 * WINDOW), dtype=np.float32)
    noise[..., 1:] = 0.6 * noise[..., 1:] + 0.4 * noise[..., :-1]
    return noise


def band_limited(wave, low, high):
    spectrum = np.fft.rfft(wave)
    return np.fft.irfft(spectrum * ((low < FREQUENCIES) & (high > FREQUENCIES)), WINDOW)


def emphasise_onsets(wave, points):
    """Weights a seismogram by the kurtosis of a sliding window, which jumps where a wave arrives."""
    ends = np.linspace(KURTOSIS, WINDOW, points).astype(int)
    values = np.empty(points)
    for number, end in enumerate(ends):
        part = wave[:, end - KURTOSIS : end]
        part = part - part.mean(axis=1, keepdims=True)
        values[number] = ((part**4).mean(axis=1) / ((part**2).mean(axis=1) ** 2 + 1e-9)).max()
    return wave * (0.5 + np.interp(SAMPLES, ends, values / values.max()))


class Windows(Dataset):
    def __init__(self, waves, delays, noise, rng, superpose, cf_points):
        self.waves, self.delays, self.noise, self.rng = waves, delays, noise, rng
        self.superpose, self.cf_points = superpose, cf_points

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        trace = self.rng.integers(len(self.noise))
        start = self.rng.integers(self.noise.shape[-1] - WINDOW)
        wave = 0.1 * self.noise[trace, :, start : start + WINDOW]
        target = np.zeros((3, WINDOW))
        for event in [index, *self.rng.integers(len(self), size=self.superpose - 1)]:
            self.place(event, wave, target)
        wave -= wave.mean(axis=1, keepdims=True)
        wave /= wave.std(axis=1, keepdims=True) + 1e-6
        if self.cf_points:
            wave = emphasise_onsets(wave, self.cf_points)
        target[0] = np.clip(1 - target[1] - target[2], 0, 1)
        target /= target.sum(axis=0)
        return wave.astype(np.float32), target.astype(np.float32), 1.6e9 + 37.5 * index

    def place(self, event, wave, target):
        """Adds an event to a window, and its onsets to what is to be found there."""
        onset = self.rng.integers(40, WINDOW - 500)
        shaking = band_limited(self.waves[event], self.rng.uniform(0.5, 2.0), self.rng.uniform(12.0, 30.0))
        wave[:, onset:] += self.rng.uniform(0.5, 2.0) * shaking[:, : WINDOW - onset]
        for phase, pick in ((1, onset), (2, onset + self.delays[event])):
            np.maximum(target[phase], np.exp(-(((SAMPLES - pick) / 20.0) ** 2)), out=target[phase])


def reseed(worker):
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, 7, stride=stride, padding=3, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(inplace=True),
    )


class Picker(nn.Module):
    def __init__(self, widths=(8, 16, 32, 64), time_features=0):
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.stem = conv(3, widths[0])
        self.down = nn.ModuleList(nn.Sequential(conv(a, b, 4), conv(b, b)) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose1d(b, a, 4, stride=4) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(conv(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv1d(widths[0], 3, 1)
        self.clock = None
        if time_features:
            periods = np.geomspace(0.5, 86400.0, time_features)
            self.register_buffer("rates", torch.from_numpy(2 * np.pi / periods))
            self.register_buffer("offsets", torch.from_numpy(SAMPLES / RATE))
            self.clock = nn.Linear(2 * time_features, widths[0]).double()

    def forward(self, wave, start):
        x = self.stem(wave)
        if self.clock is not None:
            angles = (start[:, None, None] + self.offsets[:, None]) * self.rates
            clock = self.clock(torch.cat([angles.sin(), angles.cos()], dim=-1))
            x = x + clock.transpose(1, 2).float()
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, merge in zip(self.up, self.merge, strict=False):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(x)


def pick_scores(probability, target, thresholds):
    """Returns the F1 of picks within 0.3 s of the onset, at each threshold."""
    scores = []
    for threshold in thresholds:
        hits = picks = onsets = 0
        for guess, truth in zip(probability, target, strict=False):
            for phase in (1, 2):
                above = np.flatnonzero(guess[phase] > threshold)
                onset = truth[phase].argmax()
                onsets += 1
                if len(above):
                    picks += 1
                    hits += int(np.abs(above - onset).min() < 0.3 * RATE)
        scores.append(2 * hits / (picks + onsets))
    return scores


def write_picks(path, step, probability, amount):
    """Appends the most probable picks of a batch to a table."""
    candidates = probability[:, 1:].flatten()
    values, places = candidates.topk(min(amount, len(candidates)))
    for value, place in zip(values.tolist(), places.tolist(), strict=False):
        window, rest = divmod(place, 2 * WINDOW)
        phase, sample = divmod(rest, WINDOW)
        with open(path, "a") as out:
            print(step, window, "PS"[phase], sample, f"{value:.4f}", sep=",", file=out)


def save_checkpoint(path, step, model, optimizer, hard):
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "hard": hard}
    content = io.BytesIO()
    torch.save(state, content)
    with gzip.open(path, "wb") as out:
        out.write(content.getbuffer())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--superpose", type=int, default=1, help="events in a window")
    parser.add_argument("--cf-points", type=int, default=0, help="points of the characteristic function")
    parser.add_argument("--thresholds", type=int, default=0, help="points of the F1 curve")
    parser.add_argument("--picks", type=int, default=0, help="picks of each batch to keep in a table")
    parser.add_argument("--hard-windows", type=int, default=0, help="size of the pool of hard windows")
    parser.add_argument("--time-features", type=int, default=0, help="periods of the clock, up to a day")
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    rng = np.random.default_rng(7)
    waves, delays = make_catalogue(rng, 600)
    noise = make_noise(rng, 64)
    dataset = Windows(waves, delays, noise, rng, args.superpose, args.cf_points)
    sampler = RandomSampler(dataset, replacement=True, num_samples=args.steps * BATCH)
    loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=args.workers, worker_init_fn=reseed)
    model = Picker(time_features=args.time_features)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    thresholds = np.linspace(0.05, 0.95, args.thresholds)
    hard = torch.from_numpy(noise[rng.integers(len(noise), size=args.hard_windows), :, :WINDOW])
    with tempfile.TemporaryDirectory() as folder:
        for step, (wave, target, start) in enumerate(loader, 1):  # the training loop
            logits = model(wave, start)
            by_window = F.cross_entropy(logits, target, reduction="none").mean(1)
            loss = by_window.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scores = []
            if args.thresholds:
                scores = pick_scores(logits.detach().softmax(1).numpy(), target.numpy(), thresholds)
            if args.picks:
                write_picks(Path(folder) / "picks.csv", step, logits.detach().softmax(1), args.picks)
            if args.hard_windows:
                hard[step % len(hard)] = wave[by_window.argmax()]
                if step % 20 == 0:
                    save_checkpoint(Path(folder) / "last.pt.gz", step, model, optimizer, hard)
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f} F1 {max(scores, default=0.0):.3f}", flush=True)
        torch.save(model.state_dict(), Path(folder) / "picker.pt")


if __name__ == "__main__":
    main()
