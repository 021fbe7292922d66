"""Predicts the power of a wind park's next six hours; validates averaged weights after each epoch."""

import argparse
from copy import deepcopy

import torch
from torch import nn

CHANNELS, PAST, AHEAD = 12, 96, 24


class Dilated(nn.Module):
    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 5, padding=2 * dilation, dilation=dilation, bias=False)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class PowerCurve(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.entry = nn.Conv1d(CHANNELS, width, 1)
        self.body = nn.Sequential(Dilated(width, 1), Dilated(width, 2), Dilated(width, 4))
        self.head = nn.Linear(2 * width, AHEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(self.entry(x))
        return self.head(torch.cat([x.mean(2), x[:, :, -1]], 1))


class Park:
    """Quarter hours of wind, direction, temperature and the like, and what the park then gave."""

    def __init__(self, windows: int):
        total = windows + PAST + AHEAD
        noise = torch.randn(CHANNELS, total).cumsum(1)
        weather = (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True)
        power = torch.sigmoid(2 * weather[0] + 0.5 * weather[1])
        self.inputs = weather.unfold(1, PAST, 1)[:, :windows].transpose(0, 1).contiguous()
        self.targets = power[PAST:].unfold(0, AHEAD, 1)[:windows].contiguous()


class Trainer:
    def __init__(self, steps: int, rows: int = 48, decay: float = 0.99):
        self.steps, self.rows, self.decay = steps, rows, decay
        self.done = 0
        park = Park(3072 + 192)
        self.train_set = park.inputs[:3072], park.targets[:3072]
        self.held_out = park.inputs[3072:], park.targets[3072:]
        self.model = PowerCurve()
        self.averaged = deepcopy(self.model).requires_grad_(False).eval()
        self.weights = [weight.detach() for weight in self.model.parameters()]
        self.averages = list(self.averaged.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def epoch(self) -> None:
        inputs, targets = self.train_set
        order = torch.randperm(len(inputs)).split(self.rows)
        for rows in order[: self.steps - self.done]:  # the training loop
            loss = nn.functional.l1_loss(self.model(inputs[rows]), targets[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.weights, 1 - self.decay)
            self.done += 1

    @torch.inference_mode()
    def validate(self) -> float:
        inputs, targets = self.held_out
        return nn.functional.l1_loss(self.averaged(inputs), targets).item()

    def fit(self) -> None:
        while self.done < self.steps:
            self.epoch()
            print(f"after {self.done} steps: validation error {self.validate():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(77)
    Trainer(args.steps).fit()


if __name__ == "__main__":
    main()
