"""Learns features of surface defects without labels: two views of each image, and a queue of negatives."""

import argparse
import copy
import math
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

SIDE = 40
CROP = 32
BATCH = 48
QUEUE = 40 * BATCH


def synthesise(amount):
    """Returns images of a rolled surface, and what is on each: nothing, a scratch, a pit or a stain."""
    images = 0.6 * F.avg_pool2d(torch.randn(amount, 1, SIDE, SIDE + 8), (1, 9), 1)
    kinds = torch.randint(4, (amount,))
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    left, top, turn, size = torch.rand(4, amount, 1, 1)
    dx, dy = x - (left - 0.5), y - (top - 0.5)
    across = dx * torch.cos(turn * math.pi) + dy * torch.sin(turn * math.pi)
    distance = (dx.square() + dy.square()).sqrt() / (0.1 + 0.2 * size)
    scratch = torch.exp(-(across / 0.06).square())
    pit = -1.5 * torch.exp(-distance.square())
    stain = 0.8 * torch.sigmoid(8 * (2 - distance))
    for kind, shape in enumerate((scratch, pit, stain), 1):
        images[:, 0] += shape * (kinds == kind)[:, None, None]
    return images, kinds


def random_view(images):
    """Crops, turns, mirrors and relights each image of a batch in its own way."""
    amount = len(images)
    turn = 0.6 * (torch.rand(amount) - 0.5)
    scale = 0.6 + 0.35 * torch.rand(amount)
    mirror = torch.where(torch.rand(amount) < 0.5, -1.0, 1.0)
    shift = (2 * torch.rand(2, amount) - 1) * (1 - scale)
    cos, sin = scale * turn.cos(), scale * turn.sin()
    theta = torch.stack([mirror * cos, -sin, shift[0], mirror * sin, cos, shift[1]], dim=1)
    grid = F.affine_grid(theta.view(amount, 2, 3), [amount, 1, CROP, CROP], align_corners=False)
    views = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    light, contrast = torch.rand(2, amount, 1, 1, 1)
    return torch.randn_like(views).mul_(0.05).add_(views * (0.7 + 0.6 * contrast)).add_(0.3 * (light - 0.5))


class Residual(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


def make_encoder(features):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        Residual(16, 32),
        Residual(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, features),
    )


class MomentumContrast(nn.Module):
    def __init__(self, features=64, momentum=0.99, temperature=0.2):
        super().__init__()
        self.momentum, self.temperature, self.place = momentum, temperature, 0
        self.encoder = make_encoder(features)
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(QUEUE, features), dim=1))
        self.register_buffer("labels", torch.arange(BATCH))

    @torch.no_grad()
    def keys_of(self, views):
        students, teachers = list(self.encoder.parameters()), list(self.teacher.parameters())
        torch._foreach_lerp_(teachers, students, 1 - self.momentum)
        return F.normalize(self.teacher(views), dim=1)

    def forward(self, first, second):
        """Returns the NT-Xent loss of one view against the other, the rest of the batch and the queue."""
        queries = F.normalize(self.encoder(first), dim=1)
        keys = self.keys_of(second)
        logits = queries @ torch.cat([keys, self.queue]).T / self.temperature
        self.queue[self.place : self.place + BATCH] = keys
        self.place = (self.place + BATCH) % QUEUE
        return F.cross_entropy(logits, self.labels)


@torch.inference_mode()
def neighbours_accuracy(encoder, images, kinds, gallery=256):
    """Returns how often the ten nearest images of the gallery agree with the kind of an image."""
    encoder.eval()
    edge = (SIDE - CROP) // 2
    features = F.normalize(encoder(images[..., edge : edge + CROP, edge : edge + CROP]), dim=1)
    encoder.train()
    near = (features[gallery:] @ features[:gallery].T).topk(10, dim=1).indices
    votes = F.one_hot(kinds[:gallery][near], 4).sum(1)
    return (votes.argmax(1) == kinds[gallery:]).float().mean().item()


def minibatches(images):
    while True:
        order = torch.randperm(len(images))
        for rows in order[: len(order) // BATCH * BATCH].split(BATCH):
            yield images[rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.06)
    args = parser.parse_args()
    torch.manual_seed(23)
    images, _ = synthesise(3000)
    known, kinds = synthesise(384)
    model = MomentumContrast()
    optimizer = torch.optim.SGD(
        model.encoder.parameters(), lr=args.rate, momentum=0.9, weight_decay=1e-4, fused=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    average = torch.zeros(())
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(1, args.steps + 1)
        for step, batch in zip(numbers, minibatches(images), strict=False):  # the training loop
            loss = model(random_view(batch), random_view(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.lerp_(loss.detach(), 1 / min(step, 20))
            if step % 50 == 0:
                print(f"{step} loss {average.item():.3f} rate {scheduler.get_last_lr()[0]:.4f}")
            if step % 100 == 0:
                print(f"{step} neighbours agree {neighbours_accuracy(model.encoder, known, kinds):.1%}")
                torch.save(model.state_dict(), Path(folder) / "contrast.pt")


if __name__ == "__main__":
    main()
