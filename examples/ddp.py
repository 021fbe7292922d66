"""Trains a 1-D convolutional network to tell waveforms apart, with one process per rank.

torchrun --nproc-per-node 2 examples/ddp.py
python examples/ddp.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_KINDS = 4


def make_waves(num_waves: int, length: int, generator: torch.Generator) -> TensorDataset:
    """Makes noisy sine, square, saw-tooth and triangle waves, labelled 0 to 3."""
    kind = torch.arange(num_waves) % NUM_KINDS
    frequency = 2 + 6 * torch.rand(num_waves, 1, generator=generator)
    offset = torch.rand(num_waves, 1, generator=generator)
    phase = (frequency * torch.linspace(0, 1, length) + offset) % 1.0
    sine = torch.sin(2 * torch.pi * phase)
    shapes = torch.stack([sine, sine.sign(), 2 * phase - 1, 4 * (phase - 0.5).abs() - 1])
    noise = 0.5 * torch.randn(num_waves, length, generator=generator)
    return TensorDataset((shapes[kind, torch.arange(num_waves)] + noise).unsqueeze(1), kind)


def make_model() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 1
    for width in (32, 64, 128):
        layers += [nn.Conv1d(channels, width, 9, stride=2, padding=4), nn.GroupNorm(8, width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, NUM_KINDS))


def average_over_ranks(value: float, device: torch.device) -> float:
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Returns the share of all ranks' waves that are told right."""
    model.eval()
    correct = 0
    for wave, kind in loader:
        correct += (model(wave.to(device)).argmax(dim=1) == kind.to(device)).sum().item()
    model.train()
    return average_over_ranks(correct / len(loader.sampler), device)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waves", type=int, default=6400)
    parser.add_argument("--test-waves", type=int, default=640)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="waves per rank and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-weights", type=Path, help="where rank 0 saves the final weights")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    distributed = "RANK" in os.environ
    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank() if distributed else 0
    world_size = dist.get_world_size() if distributed else 1
    torch.manual_seed(args.seed)

    waves = make_waves(args.waves, args.length, torch.Generator().manual_seed(args.seed))
    test_waves = make_waves(args.test_waves, args.length, torch.Generator().manual_seed(args.seed + 1))
    sampler = DistributedSampler(waves, world_size, rank, seed=args.seed, drop_last=True)
    test_sampler = DistributedSampler(test_waves, world_size, rank, shuffle=False)
    loader = DataLoader(waves, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_waves, args.batch_size, sampler=test_sampler)
    model: nn.Module = make_model().to(device)
    if distributed:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if rank == 0:
        print(f"{len(waves)} waves, {world_size} ranks, {len(loader)} steps per epoch", flush=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running_loss = 0.0
        for wave, kind in loader:
            wave, kind = wave.to(device), kind.to(device)
            optimizer.zero_grad()
            loss = criterion(model(wave), kind)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        mean_loss = average_over_ranks(running_loss / len(loader), device)
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}: train loss {mean_loss:.4f}, test accuracy {accuracy:.3f}", flush=True
            )

    if rank == 0 and args.save_weights:
        trained = model.module if distributed else model
        torch.save(trained.state_dict(), args.save_weights)
    if distributed:
        dist.barrier()  # no rank leaves while another still works, or its threads still send
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
