"""Two ranks learn sounds from spectrograms, three micro-batches to an update; the first keeps the log."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(inplace=True),
    )


class Fit:
    def __init__(self, micro_batches: int):
        torch.manual_seed(17)
        self.rank, self.micro_batches = dist.get_rank(), micro_batches
        network = nn.Sequential(
            stage(1, 32), stage(32, 48), stage(48, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.model = DistributedDataParallel(
            nn.Sequential(network, nn.Linear(64, 10)), gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, fused=True)
        self.meter = torch.zeros(2)

    def batches(self, sounds: TensorDataset, rows: int):
        sampler = DistributedSampler(sounds, seed=5)
        loader = DataLoader(sounds, sampler=BatchSampler(sampler, rows, drop_last=True), batch_size=None)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    def update(self, batches) -> None:
        for micro in range(self.micro_batches):
            apart = self.model.no_sync() if micro + 1 < self.micro_batches else contextlib.nullcontext()
            picture, kind = next(batches)
            with apart:
                loss = nn.functional.cross_entropy(self.model(picture), kind)
                (loss / self.micro_batches).backward()
            self.meter += torch.stack([loss.detach(), torch.ones(())])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def log(self, step: int) -> None:
        dist.all_reduce(self.meter)
        if self.rank == 0:
            print(f"step {step}: loss {float(self.meter[0] / self.meter[1]):.4f}", flush=True)
        self.meter.zero_()


def main() -> None:
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=120)
    steps = cli.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fit = Fit(micro_batches=3)
    sounds = TensorDataset(torch.randn(16 * 60, 1, 64, 64), torch.randint(10, (16 * 60,)))
    batches = fit.batches(sounds, rows=16)
    for step in range(steps):  # the training loop
        fit.update(batches)
        if step % 30 == 29:
            fit.log(step)
    if fit.rank == 0:
        torch.save(fit.model.module.state_dict(), "sounds.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
