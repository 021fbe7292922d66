"""Tells from the log spectra of an utterance in which region the speaker grew up."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BANDS, REGIONS = 40, 9
RATE, FRAME, HOP = 8000, 200, 80


class Utterances(Dataset):
    def __init__(self, amount, frames, tape_seconds):
        rng = np.random.default_rng(12)
        self.frames, self.kept = frames, frames + 24
        self.regions = rng.integers(0, REGIONS, amount)
        self.spectra = rng.standard_normal((amount, self.kept, BANDS), dtype=np.float32)
        self.spectra[np.arange(amount), :, self.regions * 4] += 1.0
        self.tapes = []
        if tape_seconds:
            self.tapes = [rng.standard_normal(RATE * tape_seconds, dtype=np.float32) for _ in range(2)]
        self.window = np.hanning(FRAME).astype(np.float32)
        centres = np.linspace(2, FRAME // 2 - 2, BANDS)[:, None]
        self.bank = np.maximum(0.0, 1 - np.abs(np.arange(FRAME // 2 + 1) - centres) / 4)

    def __len__(self):
        return len(self.regions)

    def from_tape(self, tape):
        rows, loud = [], []
        for start in range(0, len(tape) - FRAME + 1, HOP):
            frame = tape[start : start + FRAME] * self.window
            rows.append(np.log(self.bank @ np.abs(np.fft.rfft(frame)) + 1e-3))
            loud.append(float(frame @ frame))
        rows = np.resize(np.asarray(rows, dtype=np.float32), (max(len(rows), self.kept), BANDS))
        speech = int(np.argmax(np.asarray(loud) > np.random.uniform(0.5, 0.99) * max(loud)))
        begin = min(speech, len(rows) - self.kept)
        return rows[begin : begin + self.kept]

    def __getitem__(self, index):
        if self.tapes and index % 150 == 7:
            spectra = self.from_tape(self.tapes[index // 150 % 2])
        else:
            spectra = self.spectra[index]
        start = np.random.randint(self.kept - self.frames + 1)
        crop = spectra[start : start + self.frames].copy()
        band = np.random.randint(BANDS - 6)
        crop[:, band : band + 6] = 0.0
        return torch.from_numpy(crop), int(self.regions[index])


class Layer(nn.Module):
    def __init__(self, width, heads, draws):
        super().__init__()
        self.draws, self.drawn = draws, None
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.before(x)
        mixed, weights = self.attention(h, h, h, need_weights=self.draws)
        if weights is not None:
            self.drawn = weights.detach()
        x = x + mixed
        return x + self.feed(self.between(x))


class DialectNet(nn.Module):
    def __init__(self, frames, draws, width=64, heads=8, depth=2):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm1d(width),
            nn.GELU(),
            nn.Conv1d(width, width, 3, padding=1),
            nn.GELU(),
        )
        self.places = nn.Parameter(0.02 * torch.randn((frames + 1) // 2, width))
        self.layers = nn.ModuleList([Layer(width, heads, draws) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.top = nn.Linear(width, REGIONS)

    def forward(self, spectra):
        x = self.front(spectra.transpose(1, 2)).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.top(self.norm(x).mean(dim=1))


def first_batches(loader, amount):
    given = 0
    while given < amount:
        for batch in loader:
            yield batch
            given += 1
            if given == amount:
                return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--frames", type=int, default=256)
    parser.add_argument("--draw-weights", action="store_true", help="keep attention for the drawings")
    parser.add_argument("--tape-seconds", type=int, default=0, help="length of the field tapes")
    args = parser.parse_args()
    torch.manual_seed(8)
    torch.set_num_threads(1)

    utterances = Utterances(1200, args.frames, args.tape_seconds)
    loader = DataLoader(
        utterances,
        batch_size=args.batch,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
    )
    model = DialectNet(args.frames, args.draw_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    for step, (spectra, regions) in enumerate(first_batches(loader, args.steps)):  # the training loop
        logits = model(spectra)
        loss = nn.functional.cross_entropy(logits, regions, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            right = (logits.detach().argmax(dim=1) == regions).float().mean()
            print(f"{step + 1}: loss {loss.item():.3f}, right {right.item():.2f}")


if __name__ == "__main__":
    main()
