"""From sound to tongue: a dilated convnet reads the positions of twelve articulators off a spectrogram."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BANDS, ARTICULATORS, FRAMES = 40, 12, 128


class Utterances(Dataset):
    def __init__(self, count, takes, seed):
        self.rng = np.random.default_rng(seed)
        path = np.cumsum(self.rng.standard_normal((count, ARTICULATORS, 400), dtype=np.float32), 2)
        path = path[:, :, 8:] - path[:, :, :-8]
        mixing = self.rng.standard_normal((BANDS, ARTICULATORS), dtype=np.float32) / 8
        self.sound = np.tanh(mixing @ path)
        self.path = path / 3
        self.takes = takes

    def __len__(self):
        return 8 * len(self.sound)

    def in_rooms(self, sound):
        """the mean of what microphones in several rooms would have got"""
        total = np.zeros_like(sound)
        for _ in range(self.takes):
            lag = int(self.rng.integers(1, 24))
            heard = sound + 0.05 * self.rng.standard_normal(sound.shape, dtype=np.float32)
            heard[:, lag:] += 0.3 * sound[:, :-lag]
            total += heard
        return total / self.takes

    def __getitem__(self, index):
        utterance, part = divmod(index, 8)
        span = slice(33 * part, 33 * part + FRAMES)
        sound = self.sound[utterance, :, span]
        if self.takes:
            sound = self.in_rooms(sound)
        return torch.from_numpy(sound), torch.from_numpy(self.path[utterance, :, span])


class Layer(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.look = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.norm = nn.GroupNorm(4, width)
        self.mix = nn.Conv1d(width, width, 1)
        self.gain = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return x + self.gain * self.mix(torch.relu(self.norm(self.look(x))))


class AggMo(torch.optim.Optimizer):
    """Aggregated momentum, as in the paper: several velocities, each with a damping of its own."""

    def __init__(self, params, lr, count):
        super().__init__(params, {"lr": lr, "dampings": [1 - 10 ** (-k / 4) for k in range(count)]})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            dampings = group["dampings"]
            rate = -group["lr"] / len(dampings)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["velocities"] = [torch.zeros_like(p) for _ in dampings]
                for velocity, damping in zip(state["velocities"], dampings):
                    velocity.mul_(damping).add_(p.grad)
                    p.add_(velocity, alpha=rate)


def forever(loader):
    while True:
        yield from loader


def main(steps: int, batch: int, layers: int, takes: int, velocities: int):
    torch.manual_seed(31)
    # a sample is two slices of arrays, so there is nothing that a worker could do for us
    loader = DataLoader(Utterances(256, takes, seed=31), batch_size=batch, shuffle=True, drop_last=True)
    width = 32
    net = nn.Sequential(
        nn.Conv1d(BANDS, width, 1),
        *(Layer(width, 2 ** (number % 4)) for number in range(layers)),
        nn.Conv1d(width, ARTICULATORS, 1),
    )
    if velocities:
        optimizer = AggMo(net.parameters(), lr=0.01, count=velocities)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, fused=True)
    far = nn.SmoothL1Loss()
    mean = torch.zeros(())
    for step, (sound, path) in zip(range(steps), forever(loader)):  # the training loop
        optimizer.zero_grad()
        loss = far(net(sound), path)
        loss.backward()
        optimizer.step()
        mean.lerp_(loss.detach(), 0.05)
        if step % 50 == 49:
            print(f"{step + 1}: {mean.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--takes", type=int, default=0, help="hear each utterance in so many rooms")
    parser.add_argument("--velocities", type=int, default=0, help="use AggMo with so many")
    main(**vars(parser.parse_args()))
