"""Scores sleep stages from two-channel EEG windows, which are kept compressed in memory."""

import argparse
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

CHANNELS, SAMPLES, RATE = 2, 3000, 100
STAGES = ("W", "N1", "N2", "N3", "R")
RHYTHMS = np.array([10.0, 6.5, 13.0, 1.5, 4.5])


def record_nights(nights, windows):
    rng = np.random.default_rng(5)
    clock = np.arange(SAMPLES) / RATE
    stages = rng.integers(0, len(STAGES), (nights, windows))
    recordings = []
    for night in stages:
        phase = rng.uniform(0, 2 * np.pi, (windows, CHANNELS, 1))
        waves = 40 * np.sin(2 * np.pi * RHYTHMS[night][:, None, None] * clock + phase)
        waves += rng.normal(0, 25, waves.shape)
        recordings.append([zlib.compress(wave.astype(np.int16).tobytes(), 1) for wave in waves])
    return recordings, stages


class MuscleBursts:
    """Adds short twitches at random places, as the chin electrode picks them up."""

    def __init__(self, count):
        self.count = count

    def __call__(self, wave):
        for _ in range(self.count):
            length = np.random.randint(40, 200)
            start = np.random.randint(0, SAMPLES - length)
            span = np.arange(length)
            envelope = np.exp(-0.5 * ((span - length / 2) / (length / 6)) ** 2)
            twitch = np.sin(span * np.random.uniform(0.8, 2.5)) * envelope
            wave[:, start : start + length] += (np.random.normal(0, 0.3) * twitch).astype(np.float32)
        return wave


class SleepWindows(Dataset):
    def __init__(self, recordings, stages, references, artefacts, transform):
        self.recordings, self.stages = recordings, stages
        self.references, self.artefacts = references, artefacts
        self.transform = transform
        self.bank = None

    def __len__(self):
        return self.stages.size

    def render_bank(self):
        smooth = np.hanning(801) / 400
        self.bank = np.empty((self.artefacts, CHANNELS, SAMPLES), np.float32)
        for artefact in self.bank:
            for channel in artefact:
                channel[:] = np.convolve(np.random.standard_normal(SAMPLES), smooth, "same")

    def decode(self, night, window):
        raw = zlib.decompress(self.recordings[night][window])
        return np.frombuffer(raw, np.int16).astype(np.float32).reshape(CHANNELS, SAMPLES)

    def __getitem__(self, index):
        night, window = divmod(index, self.stages.shape[1])
        wave = self.decode(night, window)
        level = np.abs(wave).mean()
        for other in np.random.randint(0, self.stages.shape[1], self.references):
            level += np.abs(self.decode(night, other)).mean()
        wave /= level / (self.references + 1)
        if np.random.random() < 0.3:
            wave += self.bank[np.random.randint(len(self.bank))]
        return torch.from_numpy(self.transform(wave)), int(self.stages[night, window])


def open_worker(number):
    get_worker_info().dataset.render_bank()


def block(inputs, outputs, kernel, stride=1):
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(inplace=True),
    )


def build_model():
    return nn.Sequential(
        block(CHANNELS, 24, 50, stride=10),
        nn.MaxPool1d(4),
        block(24, 48, 7),
        block(48, 64, 5),
        nn.MaxPool1d(3),
        block(64, 96, 3),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(96, len(STAGES)),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--references", type=int, default=1, help="windows of the night to normalise by")
    parser.add_argument("--artefacts", type=int, default=40, help="movement artefacts to choose from")
    parser.add_argument("--bursts", type=int, default=0, help="muscle bursts in each window")
    parser.add_argument("--release-workers", action="store_true", help="free their memory after an epoch")
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)

    recordings, stages = record_nights(nights=16, windows=64)
    windows = SleepWindows(recordings, stages, args.references, args.artefacts, MuscleBursts(args.bursts))
    loader = DataLoader(
        windows,
        batch_size=args.batch,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        worker_init_fn=open_worker,
        persistent_workers=not args.release_workers,
        prefetch_factor=4,
    )
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.02, fused=True)

    step = 0
    while step < args.steps:
        for waves, labels in loader:  # the training loop
            logits = model(waves)
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                right = (logits.argmax(1) == labels).float().mean().item()
                print(f"step {step}: loss {loss.item():.3f}, right {right:.2f}")
            if step >= args.steps:
                break


if __name__ == "__main__":
    main()
