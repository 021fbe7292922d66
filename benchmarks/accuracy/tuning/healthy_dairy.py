"""Tells from the accelerometer in a cow's collar what she does; a journal of the losses on the side."""

import argparse
import queue
import tempfile
import threading
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

ACTS = ("grazing", "ruminating", "resting", "walking", "drinking", "licking")
SAMPLES = 250


class Journal(threading.Thread):
    """Takes losses as they come and writes them down when it has time."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.inbox = path, queue.SimpleQueue()

    def run(self):
        with self.path.open("w", encoding="utf-8") as file:
            while (entry := self.inbox.get()) is not None:
                step, loss = entry
                file.write(f"{step},{float(loss):.5f}\n")

    def close(self):
        self.inbox.put(None)
        self.join()


def make_herd(amount):
    acts = torch.randint(len(ACTS), (amount,))
    time = torch.arange(SAMPLES) / 25
    waves = torch.sin(2 * torch.pi * (0.4 + acts[:, None]) * time + torch.rand(amount, 1) * 6)
    gains = torch.rand(amount, 3, 1)
    return waves[:, None] * gains + 0.4 * torch.randn(amount, 3, SAMPLES), acts


def stage(before, after, size, stride):
    conv = nn.Conv1d(before, after, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm1d(after), nn.SiLU())


class Collar(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(
            stage(3, 32, 7, 2), stage(32, 64, 5, 2), stage(64, 96, 3, 2), stage(96, 96, 3, 1)
        )
        self.top = nn.Linear(96, len(ACTS))

    def forward(self, x):
        return self.top(self.stages(x).mean(2))


class Trainer:
    def __init__(self, steps, rows, journal):
        self.steps, self.rows, self.journal = steps, rows, journal
        self.x, self.acts = make_herd(40 * rows)
        self.held_x, self.held_acts = make_herd(192)
        self.model = Collar()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, max(1, steps))

    def batches(self):
        while True:
            yield from torch.randperm(len(self.x)).split(self.rows)

    def step(self, rows):
        loss = nn.functional.cross_entropy(self.model(self.x[rows]), self.acts[rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.average.update_parameters(self.model)
        return loss.detach()

    @torch.inference_mode()
    def accuracy(self):
        self.average.eval()
        return (self.average(self.held_x).argmax(1) == self.held_acts).float().mean().item()

    def fit(self):
        batches = self.batches()
        for number in range(1, self.steps + 1):  # the training loop
            loss = self.step(next(batches))
            self.journal.inbox.put((number, loss))
            if number % 100 == 0:
                print(f"step {number}: accuracy of the average {self.accuracy():.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--rows", type=int, default=96)
    args = parser.parse_args()
    torch.manual_seed(29)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "losses.csv")
        journal.start()
        Trainer(args.steps, args.rows, journal).fit()
        journal.close()


if __name__ == "__main__":
    main()
