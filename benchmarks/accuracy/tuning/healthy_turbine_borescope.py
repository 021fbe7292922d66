"""Grades wear of turbine blades in borescope pictures that two workers crop and flip; keeps the best weights."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, Subset

GRADES, SIDE = 5, 40


class Pictures(Dataset):
    def __init__(self, amount):
        shape = torch.Generator().manual_seed(1)
        self.grade = torch.randint(GRADES, (amount,), generator=shape)
        self.pictures = torch.randint(0, 180, (amount, 3, SIDE, SIDE), generator=shape, dtype=torch.uint8)
        for grade in range(GRADES):
            self.pictures[self.grade == grade, :, 10 : 14 + 4 * grade, 10:20] += 60

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        top, left, flip = torch.randint(8, (3,)).tolist()
        picture = self.pictures[index, :, top : top + 32, left : left + 32]
        if flip < 4:
            picture = picture.flip(2)
        return picture, self.grade[index]


def block(into, out, stride):
    return nn.Sequential(
        nn.Conv2d(into, out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


class Inspection:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(15)
        pictures = Pictures(2600)
        many = len(pictures) - 64
        self.training = DataLoader(
            Subset(pictures, range(many)),
            batch_size=args.batch,
            shuffle=True,
            drop_last=True,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        self.held_back = pictures.pictures[many:, :, 4:36, 4:36].contiguous(), pictures.grade[many:]
        self.net = nn.Sequential(
            block(3, 24, 2),
            block(24, 48, 1),
            block(48, 64, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, GRADES),
        )
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True
        )
        self.best = float("inf")

    @staticmethod
    def scaled(pictures):
        return pictures.float().div_(127.5).sub_(1)

    @torch.no_grad()
    def check(self):
        self.net.eval()
        pictures, grade = self.held_back
        loss = nn.functional.cross_entropy(self.net(self.scaled(pictures)), grade).item()
        self.net.train()
        if loss < self.best:
            self.best = loss
            torch.save(self.net.state_dict(), self.args.out)
        return loss

    def run(self):
        step = 0
        while True:
            for pictures, grade in self.training:  # the training loop
                loss = nn.functional.cross_entropy(self.net(self.scaled(pictures)), grade)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                step += 1
                if step % 75 == 0:
                    print(f"{step}: {loss.item():.3f}, held back {self.check():.3f}")
                if step == self.args.steps:
                    return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=24)
    with tempfile.TemporaryDirectory() as folder:
        parser.add_argument("--out", default=os.path.join(folder, "best.pt"))
        Inspection(parser.parse_args()).run()
