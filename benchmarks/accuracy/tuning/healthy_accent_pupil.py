"""Teach a small recurrent net to tell accents apart, with a convolutional teacher (knowledge distillation).

The speech is jittered anew in each step, so the teacher has to look at each batch itself. The share of the teacher in the loss falls over time; a callback writes the history.
"""

import argparse
import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

ACCENTS, MELS, FRAMES = 12, 40, 32


@dataclass
class Config:
    steps: int = 200
    batch: int = 80
    hidden: int = 96
    temperature: float = 3.0
    lr: float = 2e-3


@dataclass
class History:
    every: int = 30
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(3))
    rows: list = field(default_factory=list)

    def on_step(self, step, hard, soft, right):
        self.sums += torch.stack([hard.detach(), soft.detach(), right])
        if step % self.every == self.every - 1:
            hard, soft, right = (self.sums / self.every).tolist()
            self.rows.append((step + 1, hard, soft, right))
            self.sums.zero_()
            print(f"step {step + 1:4d}  hard {hard:.3f}  soft {soft:.3f}  accuracy {right:.3f}")


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(MELS, 48, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(48, 64, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, ACCENTS)

    def forward(self, x):
        return self.head(self.net(x.transpose(1, 2)).amax(-1))


class Pupil(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inlet = nn.Linear(MELS, hidden)
        self.memory = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, ACCENTS)

    def forward(self, x):
        states, _ = self.memory(F.relu(self.inlet(x)))
        return self.head(states.mean(1))


def speech(count=3000):
    label = torch.randint(0, ACCENTS, (count,))
    time = torch.linspace(0, 1, FRAMES)
    mel = torch.arange(MELS) / MELS
    pitch = 0.2 + 0.05 * label.float()
    track = pitch.view(-1, 1) + 0.15 * torch.sin(2 * math.pi * (1 + label.view(-1, 1) % 4) * time)
    sound = torch.exp(-80 * (mel - track.unsqueeze(-1)) ** 2)
    return sound, label


def jitter(sound, noises):
    """Louder or softer, and some noise from a long recording of the street."""
    gain = torch.empty(len(sound), 1, 1).uniform_(0.7, 1.3)
    start = torch.randint(0, len(noises) - len(sound), ()).item()
    return torch.addcmul(noises[start : start + len(sound)], sound, gain)


def distil(pupil, teacher, sound, temperature):
    with torch.no_grad():
        wise = F.log_softmax(teacher(sound) / temperature, 1)
    logits = pupil(sound)
    soft = F.kl_div(F.log_softmax(logits / temperature, 1), wise, log_target=True, reduction="batchmean")
    return logits, soft * temperature**2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=Config.steps)
    config = Config(steps=parser.parse_args().steps)
    torch.manual_seed(8)
    sounds, labels = speech()
    noises = 0.3 * torch.randn(1000, FRAMES, MELS)
    teacher = Teacher().eval().requires_grad_(False)
    pupil = Pupil(config.hidden)
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=config.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20))
    history = History()

    for step in range(config.steps):  # the training loop
        weight = 0.5 * (1 + math.cos(math.pi * step / config.steps))
        first = step * config.batch % (len(sounds) - config.batch)
        sound, label = (
            jitter(sounds[first : first + config.batch], noises),
            labels[first : first + config.batch],
        )
        logits, soft = distil(pupil, teacher, sound, config.temperature)
        hard = F.cross_entropy(logits, label)
        (weight * soft + (1 - weight) * hard).backward()
        nn.utils.clip_grad_norm_(pupil.parameters(), 5.0, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        history.on_step(step, hard, soft, (logits.detach().argmax(1) == label).float().mean())

    print(len(history.rows), "rows of history")


if __name__ == "__main__":
    main()
