"""Forecasts power meters with a GRU; two workers read a shard at a time and hand over whole batches."""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WINDOW, METERS, BATCH = 32, 12, 64


def without_trend(windows: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(windows, dim=1)
    spectrum[:, :3] = 0
    return torch.fft.irfft(spectrum, n=windows.shape[1], dim=1)


class Shards(IterableDataset):
    """Readings are kept as small integers, twenty batches to a shard."""

    def __init__(self, shards: int):
        super().__init__()
        readings = 800 * torch.randn(shards * 20 * BATCH, WINDOW + 1, METERS)
        self.readings = readings.to(torch.int16).chunk(shards)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        for shard in self.readings[worker.id :: worker.num_workers]:
            for rows in torch.randperm(len(shard)).split(BATCH):
                windows = without_trend(shard[rows].float().div_(500))
                yield windows.transpose(0, 1).contiguous()


class Forecaster(nn.Module):
    def __init__(self, width: int = 192):
        super().__init__()
        self.memory = nn.GRU(METERS, width, num_layers=2)
        self.head = nn.Linear(width, METERS)

    def forward(self, windows: Tensor) -> Tensor:
        states, _ = self.memory(windows)
        return self.head(states[-1])


def main() -> None:
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=90)
    steps = cli.parse_args().steps
    torch.manual_seed(4)
    model = Forecaster()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True)
    loader = DataLoader(Shards(8), batch_size=None, num_workers=2, persistent_workers=True)
    done, total = 0, torch.zeros(())
    while done < steps:
        for windows in loader:  # the training loop
            loss = nn.functional.smooth_l1_loss(model(windows[:-1]), windows[-1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            done += 1
            if done == steps:
                break
        print(f"{done} steps, mean loss {total.item() / done:.4f}")


if __name__ == "__main__":
    main()
