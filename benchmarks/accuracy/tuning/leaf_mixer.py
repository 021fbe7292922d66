"""Tells plant families from herbarium scans with a small MLP-Mixer."""

import argparse
import hashlib
import io
import logging
import random
import socket
import threading
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIDE, PATCH, FAMILIES, BATCH = 64, 8, 12, 16
LEAVES = 480

log = logging.getLogger("herbarium")


@dataclass(frozen=True)
class Leaf:
    photo: Tensor
    shape: Tensor
    galls: list[tuple[int, int]]
    family: int


class Archive:
    """Holds the scans; asked over a socket, it takes its time to answer."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.desk, self.cellar = socket.socketpair()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while request := self.cellar.recv(4):
            time.sleep(self.seconds)
            self.cellar.sendall(request)

    def fetch(self, number: int) -> int:
        self.desk.sendall(number.to_bytes(4, "little"))
        return int.from_bytes(self.desk.recv(4), "little")


def outline(points: int, dice: random.Random) -> str:
    return " ".join(
        f"{dice.uniform(0, SIDE - 1):.3f},{dice.uniform(0, SIDE - 1):.3f}" for _ in range(points)
    )


def trace(text: str) -> Tensor:
    """Marks the pixels that an outline goes through."""
    pixels = []
    for pair in text.split():
        x, y = pair.split(",")
        pixels.append(round(float(y)) * SIDE + round(float(x)))
    shape = torch.zeros(SIDE * SIDE)
    shape[pixels] = 1.0
    return shape.view(1, SIDE, SIDE)


class Herbarium(Dataset):
    def __init__(self, options: argparse.Namespace):
        dice = random.Random(5)
        self.photos = (torch.rand(LEAVES, 3, SIDE, SIDE) - 0.5) / 0.29
        self.shapes = (torch.rand(LEAVES, 1, SIDE, SIDE) > 0.5).float()
        self.outlines = [outline(options.points, dice) for _ in range(32)] if options.points else []
        self.galls = [
            [(dice.randrange(SIDE), dice.randrange(SIDE)) for _ in range(options.galls)] for _ in range(32)
        ]
        self.archive = Archive(options.archive / 1000) if options.archive else None

    def __len__(self) -> int:
        return LEAVES

    def __getitem__(self, number: int) -> Leaf:
        if self.archive:
            number = self.archive.fetch(number)
        shape = trace(self.outlines[number % 32]) if self.outlines else self.shapes[number]
        return Leaf(self.photos[number], shape, self.galls[number % 32], number % FAMILIES)


def press(leaves: list[Leaf]) -> tuple[Tensor, Tensor]:
    """Lays the leaves of a batch side by side, with a channel that says where the galls are."""
    galls = torch.zeros(len(leaves), 1, SIDE, SIDE)
    for row, leaf in enumerate(leaves):
        for x, y in leaf.galls:
            galls[row, 0, y, x] = 1.0
    photos = torch.stack([leaf.photo for leaf in leaves])
    shapes = torch.stack([leaf.shape for leaf in leaves])
    return torch.cat([photos, shapes, galls], 1), torch.tensor([leaf.family for leaf in leaves])


class Block(nn.Module):
    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 128), nn.GELU(), nn.Linear(128, tokens))
        self.within = nn.Sequential(nn.Linear(width, 384), nn.GELU(), nn.Linear(384, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.before(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.between(x))


def mixer(width: int = 128, blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.PixelUnshuffle(PATCH),
        nn.Flatten(2),
        Tokens(5 * PATCH * PATCH, width),
        *[Block((SIDE // PATCH) ** 2, width) for _ in range(blocks)],
        nn.LayerNorm(width),
        nn.AdaptiveAvgPool2d((1, width)),
        nn.Flatten(),
        nn.Linear(width, FAMILIES),
    )


class Tokens(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2))


def dust(images: Tensor, specks: int, dice: random.Random) -> Tensor:
    """Makes the scans look as old as those in the drawers."""
    for image in images:
        for _ in range(specks):
            x, y = dice.randrange(SIDE - 3), dice.randrange(SIDE - 3)
            image[:3, y : y + 3, x : x + 3] = dice.random()
    return images


def check(model: nn.Module, images: Tensor, families: Tensor, batches: int) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for number in range(batches):
            rows = slice(number % 4 * BATCH, (number % 4 + 1) * BATCH)
            right += (model(images[rows]).argmax(1) == families[rows]).sum().item()
    model.train()
    return right / (batches * BATCH)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, gallery: Tensor) -> None:
    buffer = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "gallery": gallery}
    torch.save(state, buffer)
    with open("snapshot.pt", "wb") as out:
        out.write(buffer.getbuffer())
    with open("snapshot.sha256", "w") as out:
        out.write(hashlib.sha256(buffer.getbuffer()).hexdigest())


def train(options: argparse.Namespace) -> None:
    dice = random.Random(8)
    loader = DataLoader(
        Herbarium(options), batch_size=BATCH, shuffle=True, collate_fn=press, drop_last=True
    )
    held = torch.rand(4 * BATCH, 5, SIDE, SIDE), torch.randint(FAMILIES, (4 * BATCH,))
    gallery = torch.zeros(options.gallery, 256)
    model = mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    step = 0
    while step < options.steps:
        for images, families in loader:  # the training loop
            if options.specks:
                images = dust(images, options.specks, dice)
            losses = F.cross_entropy(model(images), families, reduction="none", label_smoothing=0.1)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            schedule.step()
            step += 1
            if options.lines:
                each = losses.tolist()
                for line in range(options.lines):
                    log.info("step %d part %d loss %.5f", step, line, each[line % BATCH])
            if step % 10 == 0:
                if options.gallery:
                    gallery[step % options.gallery] = losses.mean().item()
                    snapshot(model, optimizer, gallery)
                if options.check:
                    log.info("step %d accuracy %.3f", step, check(model, *held, options.check))
            if step == options.steps:
                break
    log.info("done, learning rate %.2g", schedule.get_last_lr()[0])


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=170)
    cli.add_argument("--points", type=int, default=0, help="points of a leaf's outline")
    cli.add_argument("--archive", type=float, default=0, help="milliseconds until the archive answers")
    cli.add_argument("--galls", type=int, default=0, help="galls marked on each leaf")
    cli.add_argument("--specks", type=int, default=0, help="specks of dust for each leaf")
    cli.add_argument("--lines", type=int, default=0, help="lines logged in each step")
    cli.add_argument("--gallery", type=int, default=0, help="rows that a snapshot has besides the model")
    cli.add_argument("--check", type=int, default=0, help="batches of each check of the accuracy")
    torch.manual_seed(17)
    logging.basicConfig(filename="leaves.log", filemode="w", level=logging.INFO)
    train(cli.parse_args())


if __name__ == "__main__":
    main()
