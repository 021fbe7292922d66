"""Doubles the resolution of pictures; a few held-out ones are looked at after each epoch."""

import argparse
import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


@dataclass
class Settings:
    steps: int
    channels: int = 64
    batch: int = 12
    pictures: int = 480
    held_out: int = 24
    rate: float = 2e-3


@dataclass
class Best:
    """Keeps the weights that did best."""

    loss: float = float("inf")
    weights: dict[str, Tensor] = field(default_factory=dict)

    def after_epoch(self, model: nn.Module, loss: float) -> None:
        if loss < self.loss:
            self.loss, self.weights = loss, copy.deepcopy(model.state_dict())


def upscaler(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )


def loader_of(small: Tensor, large: Tensor, batch: int) -> DataLoader:
    data = TensorDataset(small, large)
    order = BatchSampler(RandomSampler(data), batch, drop_last=True)
    return DataLoader(data, sampler=order, batch_size=None)


def fit(settings: Settings) -> Best:
    large = 2 * torch.rand(settings.pictures, 3, 64, 64) - 1
    small = nn.functional.avg_pool2d(large, 2)
    test = slice(0, settings.held_out)
    train = slice(settings.held_out, None)
    loader = loader_of(small[train], large[train], settings.batch)
    model, best = upscaler(settings.channels), Best()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.rate, momentum=0.9, weight_decay=1e-4, fused=True
    )
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    step = 0
    while step < settings.steps:
        for low, high in loader:  # the training loop
            if step == settings.steps:
                break
            loss = nn.functional.l1_loss(model(low), high)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        model.eval()
        with torch.inference_mode():
            held = nn.functional.l1_loss(model(small[test]), large[test]).item()
        model.train()
        plateau.step(held)
        best.after_epoch(model, held)
        print(f"step {step}: held-out loss {held:.4f}, best {best.loss:.4f}")
    return best


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=304)
    torch.manual_seed(12)
    fit(Settings(**vars(cli.parse_args())))
