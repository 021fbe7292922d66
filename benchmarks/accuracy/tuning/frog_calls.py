# Which frog is calling?  Course project, third version (now with a DataLoader).
import argparse
import zlib

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RATE = 4000
CLIP = 2048
SPECIES = 11
BATCH = 16


def croak(rng, kind):
    t = np.arange(CLIP, dtype=np.float32) / RATE
    pulse = 0.5 + 0.5 * np.sign(np.sin(2 * np.pi * (3 + kind) * t))
    return (np.sin(2 * np.pi * (180 + 90 * kind) * t) * pulse + 0.3 * rng.standard_normal(CLIP)).astype(
        np.float32
    )


class Ponds(IterableDataset):
    """Clips of two ponds; each worker reads its own pond."""

    def __init__(self, options):
        self.options = options
        rng = np.random.default_rng(options.seed)
        self.kinds = rng.integers(0, SPECIES, (2, 300))
        self.ponds = [np.stack([croak(rng, k) for k in row]) for row in self.kinds]
        self.packed = None
        if options.fieldbook:
            # the first pond came as packed long recordings: a clip is somewhere in the middle of one
            base = (self.ponds[0] * 8000).astype(np.int16)
            length = max(CLIP, 64 * options.fieldbook)
            self.packed = [zlib.compress(np.resize(base[i:], length).tobytes(), 6) for i in range(12)]

    def vary(self, clip, rng):
        """Other distances, other speeds, other weather."""
        for _ in range(self.options.weather):
            speed = rng.uniform(0.97, 1.03)
            clip = np.interp(np.arange(CLIP) * speed, np.arange(CLIP), clip)
            spectrum = np.fft.rfft(clip)
            spectrum *= np.linspace(1.0, rng.uniform(0.6, 1.0), len(spectrum))
            clip = np.fft.irfft(spectrum, CLIP)
        return clip.astype(np.float32)

    def __iter__(self):
        me = get_worker_info().id
        rng = np.random.default_rng((self.options.seed, me))
        clips, kinds = self.ponds[me], self.kinds[me]
        while True:
            if self.packed is not None and me == 0:
                first = int(rng.integers(len(self.packed)))
                recording = np.frombuffer(zlib.decompress(self.packed[first]), np.int16)
                at = int(rng.integers(len(recording) // CLIP))
                i = first + at % (len(clips) - first)
                clip = recording[at * CLIP : (at + 1) * CLIP] / np.float32(8000)
            else:
                i = int(rng.integers(len(clips)))
                clip = clips[i]
            if self.options.weather:
                clip = self.vary(clip, rng)
            events = [torch.tensor([k * 0.1, k * 0.1 + 0.05]) for k in range(self.options.events)]
            yield clip, int(kinds[i]), events


def collate(rows):
    clips = torch.from_numpy(np.stack([r[0] for r in rows]))
    kinds = torch.tensor([r[1] for r in rows])
    # of the first clips we also want every single call, as (start, end), for the listening sheet
    events = [e for r in rows[:8] for e in r[2]]
    return clips, kinds, events


class Ear(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(128))
        self.layers = nn.Sequential(
            nn.Conv1d(65, 128, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(128, 128, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(128, 128, 5, padding=2),
            nn.GELU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(512, SPECIES),
        )

    def forward(self, clips):
        with torch.no_grad():
            power = torch.stft(clips, 128, 32, window=self.window, return_complex=True).abs()
        return self.layers(torch.log1p(power))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--weather", type=int, default=0, help="rounds of augmentation per clip")
    p.add_argument(
        "--fieldbook", type=int, default=0, help="read pond 0 from recordings this long (in 64 samples)"
    )
    p.add_argument("--events", type=int, default=0, help="call boundaries per clip for the listening sheet")
    options = p.parse_args()
    torch.manual_seed(options.seed)
    # a listening sheet has many tensors, more than there may be open files
    torch.multiprocessing.set_sharing_strategy("file_system")

    loader = DataLoader(Ponds(options), batch_size=BATCH, num_workers=2, collate_fn=collate)
    ear = Ear()
    optimizer = torch.optim.AdamW(ear.parameters(), lr=5e-4, fused=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    running = torch.zeros(())
    heard = 0

    for step, (clips, kinds, events) in enumerate(loader, 1):  # the training loop
        loss = criterion(ear(clips), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
        heard += len(events)
        if step % 40 == 0:
            print(f"{step:5d}  loss {running.item() / 40:.3f}  calls on the sheet {heard}")
            running.zero_()
        if step >= options.steps:
            break
    print("done")


if __name__ == "__main__":
    main()
