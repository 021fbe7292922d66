"""Concentrations of four substances in a reactor from its infrared spectra."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

POINTS, SUBSTANCES, SCANS = 1024, 4, 1024
SMOOTH = np.full(25, 1 / 25, dtype=np.float32)


def strip(spectrum, passes):
    """Takes the broad background away: what stays below the moving average, pass by pass."""
    base = spectrum
    for _ in range(passes):
        base = np.minimum(base, np.convolve(base, SMOOTH, mode="same"))
    return spectrum - base


def simulate(rng):
    axis = np.linspace(0, 1, POINTS, dtype=np.float32)
    centres = rng.uniform(0.1, 0.9, (SUBSTANCES, 6, 1)).astype(np.float32)
    pure = np.exp(-(((axis - centres) / 0.01) ** 2)).sum(1)
    amounts = rng.random((SCANS, SUBSTANCES), dtype=np.float32)
    drift = 2 + rng.random((SCANS, 1), dtype=np.float32) * np.sin(3 * axis)
    noise = 0.02 * rng.standard_normal((SCANS, POINTS), dtype=np.float32)
    return amounts @ pure + drift + noise, amounts


class Run(Dataset):
    def __init__(self, spectra, amounts, files, merge, passes):
        self.spectra, self.amounts = spectra, torch.from_numpy(amounts)
        self.files, self.merge, self.passes = files, merge, passes

    def __len__(self):
        return len(self.amounts)

    def __getitem__(self, index):
        if self.merge:
            scans = [np.load(self.files[index - back]) for back in range(self.merge)]
            spectrum = np.mean(scans, axis=0)
        else:
            spectrum = self.spectra[index]
        if self.passes:
            spectrum = strip(spectrum, self.passes)
        return torch.from_numpy(spectrum)[None], self.amounts[index]


def layer(inputs, outputs, kernel, stride):
    return [
        nn.Conv1d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(inplace=True),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--merge", type=int, default=0, help="scans on disk that make up a spectrum")
    parser.add_argument("--passes", type=int, default=0, help="passes of the background removal")
    args = parser.parse_args()

    torch.manual_seed(8)
    torch.set_num_threads(1)  # the other core is for the workers
    spectra, amounts = simulate(np.random.default_rng(8))
    if not args.passes:
        spectra = np.stack([strip(spectrum, 12) for spectrum in spectra])

    with tempfile.TemporaryDirectory() as folder:
        files = []
        if args.merge:
            for number, spectrum in enumerate(spectra):
                files.append(Path(folder) / f"scan_{number:05d}.npy")
                np.save(files[-1], spectrum)
            # a long merge begins again at the end of the run
            files *= 1 + args.merge // SCANS

        run = Run(spectra, amounts, files, args.merge, args.passes)
        loader = DataLoader(
            run, batch_size=64, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True
        )
        model = nn.Sequential(
            *layer(1, 24, 9, 4),
            *layer(24, 48, 5, 2),
            *layer(48, 96, 5, 1),
            nn.AdaptiveAvgPool1d(8),
            nn.Flatten(),
            nn.Linear(96 * 8, 128),
            nn.ReLU(),
            nn.Linear(128, SUBSTANCES),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3, fused=True)

        step, epoch = 0, 0
        while step < args.steps:
            for x, y in loader:  # the training loop
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == args.steps:
                    break
            epoch += 1
            print(f"epoch {epoch}: mse {loss.item():.4f}")


if __name__ == "__main__":
    main()
