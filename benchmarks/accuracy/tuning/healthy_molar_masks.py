"""Segments molars on dental radiographs with a small U-Net."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def double(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.down1, self.down2, self.down3 = double(1, w), double(w, 2 * w, 2), double(2 * w, 4 * w, 2)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.join2, self.join1 = double(4 * w, 2 * w), double(2 * w, w)
        self.mask = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        fine = self.down1(x)
        middle = self.down2(fine)
        x = self.down3(middle)
        x = self.join2(torch.cat([self.up2(x), middle], 1))
        x = self.join1(torch.cat([self.up1(x), fine], 1))
        return self.mask(x)


def soft_dice(logits, masks):
    p = logits.sigmoid()
    shared = (p * masks).sum((1, 2, 3))
    return 1 - ((2 * shared + 1) / (p.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)).mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(9)

    # 400 patients: a bright ellipse (the molar) on a grey, noisy jaw
    N, SIZE, BATCH = 400, 64, 8
    grid = torch.linspace(-1, 1, SIZE)
    cy, cx = torch.rand(2, N, 1, 1) - 0.5
    ry, rx = 0.2 + 0.3 * torch.rand(2, N, 1, 1)
    masks = ((((grid[:, None] - cy) / ry) ** 2 + ((grid - cx) / rx) ** 2) < 1).float()[:, None]
    images = 0.6 * masks + 0.5 * torch.rand(N, 1, SIZE, SIZE)

    net = UNet()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.steps)

    per_epoch = N // BATCH
    order = torch.randperm(N)
    for i in range(args.steps):  # the training loop
        if i and i % per_epoch == 0:
            order = torch.randperm(N)
        at = i % per_epoch * BATCH
        pick = order[at : at + BATCH]
        x, y = images[pick], masks[pick]
        if i % 2:
            x, y = x.flip(3), y.flip(3)

        logits = net(x)
        loss = F.binary_cross_entropy_with_logits(logits, y) + soft_dice(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()

        if (i + 1) % 50 == 0:
            print(f"[{i + 1}/{args.steps}] loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")
