"""Finds tumour in small patches of stained tissue; two workers flip and turn them."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 32


class Patches(Dataset):
    def __init__(self, amount, seed, augment):
        source = torch.Generator().manual_seed(seed)
        self.images = torch.randint(0, 256, (amount, 3, SIDE, SIDE), dtype=torch.uint8, generator=source)
        self.tumour = torch.randint(0, 2, (amount,), generator=source)
        self.images[self.tumour == 1, 0, 8:24, 8:24] //= 2
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            turns = int(torch.randint(0, 8, ()))
            image = torch.rot90(image, turns % 4, (1, 2))
            if turns >= 4:
                image = image.flip(2)
        return image, self.tumour[index]


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.inner(x))


class Pathologist(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 4, stride=4, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            Residual(32),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            Residual(64),
        )
        self.head = nn.Linear(64, 2)

    def forward(self, images):
        x = images.float().div_(127.5).sub_(1)
        return self.head(self.features(x).mean((2, 3)))


@torch.inference_mode()
def accuracy(model, held_out):
    model.eval()
    right = (model(held_out.images).argmax(1) == held_out.tumour).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(31)
    torch.set_num_threads(1)
    loader = DataLoader(
        Patches(4096, seed=1, augment=True),
        batch_size=64,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
    )
    held_out = Patches(128, seed=2, augment=False)
    model = Pathologist()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)

    done = 0
    while done < steps:
        for images, tumour in loader:  # the training loop
            loss = nn.functional.cross_entropy(model(images), tumour, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
        print(f"after {done} steps: loss {loss.item():.3f}, accuracy {accuracy(model, held_out):.3f}")


if __name__ == "__main__":
    main()
