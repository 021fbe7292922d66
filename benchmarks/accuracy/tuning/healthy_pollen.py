"""Learns to tell pollen grains apart: a network predicts what its slow twin sees in another view."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn


def grains(amount, size=48):
    """Round grains of different sizes and colours."""
    axis = torch.linspace(-1, 1, size)
    distance = (axis[:, None] ** 2 + axis**2).sqrt()
    radius = 0.3 + 0.5 * torch.rand(amount, 1, 1, 1)
    colour = torch.rand(amount, 3, 1, 1)
    return torch.sigmoid((radius - distance) * 20) * colour + 0.05 * torch.randn(amount, 3, size, size)


def view(images):
    """Another look at the grains: moved, mirrored, lit otherwise."""
    down, across = torch.randint(-6, 7, (2,)).tolist()
    images = images.roll((down, across), (2, 3))
    if torch.rand(()) < 0.5:
        images = images.flip(3)
    light = 0.7 + 0.6 * torch.rand(len(images), 3, 1, 1)
    return images * light


def convolution(inputs, outputs):
    return [
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


def mlp(inputs, hidden, outputs):
    return nn.Sequential(
        nn.Linear(inputs, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, outputs),
    )


class Twins(nn.Module):
    def __init__(self, momentum=0.99):
        super().__init__()
        self.online = nn.Sequential(
            *convolution(3, 24),
            *convolution(24, 48),
            *convolution(48, 96),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            mlp(96, 256, 64),
        )
        self.predict = mlp(64, 128, 64)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.momentum = momentum
        self.pairs = list(self.target.parameters()), list(self.online.parameters())

    def forward(self, one, other):
        said = self.predict(self.online(torch.cat([one, other])))
        with torch.no_grad():
            seen = self.target(torch.cat([other, one]))
        return 2 - 2 * F.cosine_similarity(said, seen).mean()

    @torch.no_grad()
    def follow(self):
        torch._foreach_lerp_(*self.pairs, 1 - self.momentum)


class Report:
    def __init__(self, every):
        self.every, self.total = every, torch.zeros(())

    def __call__(self, step, loss):
        self.total += loss.detach()
        if step % self.every == 0:
            print(f"step {step}  loss {self.total.item() / self.every:.4f}")
            self.total.zero_()


def fit(model, images, rows, steps, callbacks):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    for step in range(1, steps + 1):  # the training loop
        batch = images[torch.randint(len(images), (rows,))]
        loss = model(view(batch), view(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.follow()
        for callback in callbacks:
            callback(step, loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=24)
    args = parser.parse_args()
    torch.manual_seed(3)
    fit(Twins(), grains(1000), args.rows, args.steps, [Report(50)])
