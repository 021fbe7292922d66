"""Predicts where the routing of a chip gets congested, from maps of its placement, with a small U-Net."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)


def pair(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Congestion(nn.Module):
    """Cells, pins and blockages in; the overflow of the horizontal and vertical tracks out."""

    def __init__(self):
        super().__init__()
        self.fine, self.middle, self.coarse = pair(3, 16), pair(16, 32), pair(32, 64)
        self.back_middle, self.back_fine = pair(96, 32), pair(48, 16)
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")
        self.overflow = nn.Conv2d(16, 2, 1)

    def forward(self, maps):
        fine = self.fine(maps)
        middle = self.middle(self.shrink(fine))
        coarse = self.coarse(self.shrink(middle))
        middle = self.back_middle(torch.cat([middle, self.grow(coarse)], 1))
        return self.overflow(self.back_fine(torch.cat([fine, self.grow(middle)], 1)))


def draw_chips(amount, side=40):
    maps = nn.functional.avg_pool2d(torch.randn(amount, 3, side + 4, side + 4), 5, stride=1) * 3
    wide = nn.functional.avg_pool2d(maps, (1, 9), stride=1, padding=(0, 4))
    tall = nn.functional.avg_pool2d(maps, (9, 1), stride=1, padding=(4, 0))
    return maps, torch.stack([wide.sum(1), tall.prod(1)], 1)


@torch.inference_mode()
def error_on(model, maps, overflow):
    model.eval()
    error = nn.functional.l1_loss(model(maps), overflow).item()
    model.train()
    return error


if __name__ == "__main__":
    steps = parser.parse_args().steps
    torch.manual_seed(30)
    maps, overflow = draw_chips(768)
    held = draw_chips(8)
    model = Congestion()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps + 1)
    order, at = torch.randperm(len(maps)), 0
    for step in range(1, steps + 1):  # the training loop
        if at + 8 > len(order):
            order, at = torch.randperm(len(maps)), 0
        for half in order[at : at + 8].split(4):
            loss = nn.functional.smooth_l1_loss(model(maps[half]), overflow[half])
            (loss / 2).backward()
        at += 8
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        cycle.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} held-out error {error_on(model, *held):.4f}")
