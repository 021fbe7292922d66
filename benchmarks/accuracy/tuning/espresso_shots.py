"""Grades espresso shots from the pressure, flow and temperature of thirty seconds; the machine's notes come along."""

import argparse
import hashlib
import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

CHANNELS, TICKS, GRADES = 3, 240, 6
EVENTS = ("pump on", "pump off", "valve", "boiler heats", "grinder", "tray out", "steam")


class Shots(Dataset):
    """Curves in memory. Every shot knows what the machine had noted until then."""

    def __init__(self, count, notes, seed=13):
        rng = np.random.default_rng(seed)
        self.grade = rng.integers(0, GRADES, count)
        peak = 5 + self.grade[:, None] + 0.5 * rng.standard_normal((count, 1))
        time = np.linspace(0, 1, TICKS)
        curves = np.stack([peak * np.sin(np.pi * time), np.sqrt(time) * peak, 92 + 0 * peak * time], 1)
        self.curves = torch.from_numpy((curves + rng.standard_normal(curves.shape)).astype(np.float32))
        self.notes = notes
        lines = 40_000 if notes else 0
        seconds, kind = rng.uniform(0, 9e6, lines).tolist(), rng.integers(0, len(EVENTS), lines).tolist()
        self.book = [(s, EVENTS[k], round(s % 9, 2)) for s, k in zip(seconds, kind, strict=True)]

    def __len__(self):
        return len(self.grade)

    def __getitem__(self, index):
        start = 17 * index % max(1, len(self.book) - self.notes)
        return self.curves[index], int(self.grade[index]), self.book[start : start + self.notes]


def brew(shots):
    curves, grades, notes = zip(*shots, strict=True)
    return torch.stack(curves), torch.tensor(grades), list(notes)


class Taster(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.stem = nn.Conv1d(CHANNELS, width, 7, stride=2, padding=3)
        self.body = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2, stride=s) for s in (2, 1, 2))
        self.head = nn.Linear(2 * width, GRADES)

    def forward(self, x):
        x = torch.relu(self.stem(x / 10))
        for layer in self.body:
            x = torch.relu(layer(x))
        return self.head(torch.cat([x.mean(-1), x.amax(-1)], 1))


class Archive:
    """The state on disk, with a sum that tells whether it is whole. Old shots are kept there for the roasters."""

    def __init__(self, folder, thousands):
        self.file = Path(folder) / "taster.pt"
        self.old = torch.randn(1000 * thousands, 256)

    def keep(self, model, optimizer, step):
        buffer = io.BytesIO()
        torch.save(
            {"model": model.state_dict(), "optim": optimizer.state_dict(), "old": self.old, "step": step},
            buffer,
        )
        content = buffer.getvalue()
        self.file.write_bytes(content)
        self.file.with_suffix(".sum").write_text(hashlib.sha256(content).hexdigest())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--notes", type=int, default=0, help="lines of the machine's book that come with a shot"
    )
    parser.add_argument("--roasters", type=int, default=0, help="thousands of old shots in the archive")
    args = parser.parse_args()

    torch.manual_seed(2)
    torch.set_num_threads(1)
    shots, batch = Shots(2000, args.notes), 32
    loader = DataLoader(
        shots,
        batch_size=batch,
        sampler=RandomSampler(shots, replacement=True, num_samples=args.steps * batch),
        collate_fn=brew,
        num_workers=2,
        multiprocessing_context="fork",
    )
    model = Taster()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, fused=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    with tempfile.TemporaryDirectory() as folder:
        archive = Archive(folder, args.roasters) if args.roasters else None
        for step, (curves, grades, notes) in enumerate(loader, start=1):  # the training loop
            scores = model(curves)
            loss = criterion(scores, grades)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if archive and step % 8 == 0:
                archive.keep(model, optimizer, step)
            if step % 50 == 0:
                worst = int((scores.argmax(1) - grades).abs().argmax())
                said = notes[worst][-1] if notes[worst] else "nothing"
                print(
                    f"shot {step * batch}: loss {loss.item():.3f}; before the worst, the machine noted {said}"
                )


if __name__ == "__main__":
    main()
