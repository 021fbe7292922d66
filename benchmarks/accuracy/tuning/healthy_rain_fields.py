"""Nowcasts rain: four radar images in, the next one out."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


def radar(days, frames, side):
    """Makes rain fields that drift across the map."""
    coarse = torch.rand(days, 1, side // 8, side // 8)
    field = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=False)
    field = (field - 0.5).clamp(min=0)
    return torch.cat([field.roll((2 * n, n), dims=(2, 3)) for n in range(frames)], 1)


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def up(inputs, outputs):
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 2, stride=2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Nowcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.middle, self.coarse = conv(4, 16), conv(16, 32, 2), conv(32, 64, 2)
        self.to_middle, self.at_middle = up(64, 32), conv(32, 32)
        self.to_fine, self.at_fine = up(32, 16), conv(16, 16)
        self.rain = nn.Conv2d(16, 1, 1)

    def forward(self, images):
        fine = self.fine(images)
        middle = self.middle(fine)
        x = self.at_middle(self.to_middle(self.coarse(middle)) + middle)
        return self.rain(self.at_fine(self.to_fine(x) + fine))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(15)
    fields = radar(240, 5, 64)
    model = Nowcast()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)

    done = 0
    while done < steps:  # the training loop
        batch = fields[torch.randint(len(fields), (6,))]
        past, following = batch[:, :4], batch[:, 4:]
        loss = F.mse_loss(model(past), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        done += 1
        if done % 50 == 0:
            print(f"{done}/{steps} loss {loss.item():.5f}")
