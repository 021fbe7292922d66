"""Tells products on a shelf apart by their photos."""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PRODUCTS, PHOTOS, SIDE = 20, 64, 48


def make_catalogue(folder):
    """Writes the photos of all products, and returns them as one array, too."""
    rng = np.random.default_rng(8)
    looks = rng.integers(40, 216, (PRODUCTS, 1, SIDE, SIDE, 3), dtype=np.int16)
    noise = rng.integers(-40, 40, (PRODUCTS, PHOTOS, SIDE, SIDE, 3), dtype=np.int16)
    photos = (looks + noise).astype(np.uint8).reshape(PRODUCTS * PHOTOS, SIDE, SIDE, 3)
    for number, photo in enumerate(photos):
        np.save(folder / f"{number:04d}.npy", photo)
    return photos


class Shots(Dataset):
    def __init__(self, folder, photos, amount, views, shadows):
        self.folder, self.photos, self.amount = folder, photos, amount
        self.views, self.shadows = views, shadows
        self.down = np.arange(SIDE, dtype=np.float32)[:, None]
        self.across = np.arange(SIDE, dtype=np.float32)[None, :]

    def __len__(self):
        return self.amount

    def read(self, product, photo):
        if not self.views:
            return self.photos[product * PHOTOS + photo]
        views = []
        for view in range(self.views):
            number = product * PHOTOS + (photo + view) % PHOTOS
            views.append(np.load(self.folder / f"{number:04d}.npy"))
        return np.mean(views, axis=0)

    def shade(self, image):
        for _ in range(self.shadows):
            top, left, radius = random.uniform(0, SIDE), random.uniform(0, SIDE), random.uniform(2, 9)
            inside = (self.down - top) ** 2 + (self.across - left) ** 2 < radius**2
            image[inside] *= random.uniform(0.94, 1.06)
        return image.clip(0, 1)

    def __getitem__(self, shot):
        product, photo = shot % PRODUCTS, shot // PRODUCTS % PHOTOS
        image = self.read(product, photo).astype(np.float32) / 255
        if random.random() < 0.5:
            image = image[:, ::-1]
        if self.shadows:
            image = self.shade(image)
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), product


def block(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def make_model():
    return nn.Sequential(
        block(3, 32, 2),
        block(32, 64, 2),
        block(64, 96, 2),
        block(96, 96, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(96, PRODUCTS),
    )


def endless(loader):
    while True:
        yield from loader


def accuracy(model, images, products, amount):
    model.eval()
    right = 0
    with torch.no_grad():
        for first in range(0, amount, len(images)):
            part = slice(0, amount - first)
            right += (model(images[part]).argmax(1) == products[part]).sum().item()
    model.train()
    return right / amount


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--views", type=int, default=0, help="photos of the product to average")
    parser.add_argument("--shadows", type=int, default=0, help="shadows and reflections to draw")
    parser.add_argument("--checked", type=int, default=0, help="images for the accuracy without dropout")
    args = parser.parse_args()
    torch.manual_seed(5)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shots = Shots(folder, make_catalogue(folder), 12000, args.views, args.shadows)
        loader = DataLoader(
            shots,
            batch_size=24,
            shuffle=True,
            drop_last=True,
            num_workers=1,
            prefetch_factor=4,
            persistent_workers=True,
        )
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        criterion = nn.CrossEntropyLoss()
        feed = endless(loader)
        right = 0.0
        for step in range(1, args.steps + 1):  # the training loop
            images, products = next(feed)
            loss = criterion(model(images), products)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.checked:
                right = 0.9 * right + 0.1 * accuracy(model, images, products, args.checked)
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.4f}, accuracy {right:.3f}")


if __name__ == "__main__":
    main()
