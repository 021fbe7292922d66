"""Tells earthquakes from quarry blasts in three-component seismograms that lie in one file."""

import argparse
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

LENGTH = 2048


def archive(path, amount):
    rng = np.random.default_rng(1906)
    blast = np.arange(amount) % 2
    traces = rng.standard_normal((amount, 3, LENGTH), dtype=np.float32)
    fade = np.exp(-np.arange(LENGTH - 500, dtype=np.float32) / 300)
    traces[:, :, 500:] *= 1 + (4 + 4 * blast[:, None, None]).astype(np.float32) * fade
    np.save(path, traces)
    return blast


class Archive(Dataset):
    """Whitens each trace's spectrum in its own way each time it is read."""

    def __init__(self, path, blast):
        self.path, self.blast, self.traces = path, blast, None

    def __len__(self):
        return len(self.blast)

    def __getitem__(self, index):
        if self.traces is None:
            self.traces = np.load(self.path, mmap_mode="r")
        trace = torch.from_numpy(np.array(self.traces[index]))
        spectrum = torch.fft.rfft(trace)
        strength = 0.3 + 0.5 * torch.rand(())
        spectrum = spectrum / spectrum.abs().clamp(min=1e-3) ** strength
        trace = torch.fft.irfft(spectrum, n=LENGTH)
        trace = trace.roll(int(torch.randint(-200, 200, ())), dims=1)
        return trace / trace.std(), int(self.blast[index])


def forever(loader):
    while True:
        yield from loader


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(3, 32, 9, 2), (32, 64, 7, 4), (64, 64, 5, 2)]
        self.layers = nn.Sequential(
            *[
                nn.Sequential(nn.Conv1d(i, o, k, s, k // 2, bias=False), nn.BatchNorm1d(o), nn.ReLU())
                for i, o, k, s in sizes
            ]
        )
        self.top = nn.Linear(64, 2)

    def forward(self, trace):
        return self.top(self.layers(trace).amax(2))


@torch.inference_mode()
def right(model, traces, blast):
    model.eval()
    share = (model(traces).argmax(1) == blast).float().mean().item()
    model.train()
    return share


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=24)
    args = parser.parse_args()
    torch.manual_seed(8)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.npy"
        data = Archive(path, archive(path, 1248))
        held = [data[index] for index in range(1200, 1248)]
        traces, blast = torch.stack([trace for trace, _ in held]), torch.tensor([kind for _, kind in held])
        loader = DataLoader(
            Subset(data, range(1200)),
            batch_size=args.rows,
            shuffle=True,
            num_workers=1,
            prefetch_factor=4,
            persistent_workers=True,
            drop_last=True,
        )
        model = Picker()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for step, (trace, kind) in enumerate(islice(forever(loader), args.steps), 1):  # the training loop
            loss = nn.functional.cross_entropy(model(trace), kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 60 == 0:
                print(f"{step}: loss {loss.item():.3f}, right {right(model, traces, blast):.2f}")


if __name__ == "__main__":
    main()
