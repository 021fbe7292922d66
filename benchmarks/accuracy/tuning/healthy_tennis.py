"""Learns to recognise tennis players by how they move: two rallies of one player should look alike."""

import argparse
import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

PLAYERS, RALLIES, FRAMES, SIGNALS = 2304, 6, 64, 8


class Rallies(Dataset):
    """Gives two different rallies of each of the players that it is asked for."""

    def __init__(self, players):
        style = torch.randn(players, 1, FRAMES * SIGNALS)
        self.tracks = style + 1.5 * torch.randn(players, RALLIES, FRAMES * SIGNALS)

    def __len__(self):
        return len(self.tracks)

    def __getitem__(self, players):
        players = torch.tensor(players)
        one = torch.randint(RALLIES, players.shape)
        other = (one + torch.randint(1, RALLIES, players.shape)) % RALLIES
        return self.tracks[players, one], self.tracks[players, other]


def forever(loader):
    while True:
        yield from loader


def contrast(first, second, heat=0.1):
    alike = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T / heat
    same = torch.arange(len(alike))
    return (F.cross_entropy(alike, same) + F.cross_entropy(alike.T, same)) / 2


@torch.no_grad()
def found(encoder, averages, tracks):
    """Returns how many players are found again by their second rally."""
    first, second = (functional_call(encoder, averages, (tracks[:, rally],)) for rally in (0, 1))
    alike = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T
    return (alike.argmax(1) == torch.arange(len(tracks))).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(6)

    rallies, held = Rallies(PLAYERS), Rallies(128)
    batches = BatchSampler(RandomSampler(rallies), 192, drop_last=True)
    loader = DataLoader(rallies, batch_size=None, sampler=batches)
    encoder = nn.Sequential(
        nn.Linear(FRAMES * SIGNALS, 512),
        nn.LayerNorm(512),
        nn.GELU(),
        nn.Linear(512, 512),
        nn.LayerNorm(512),
        nn.GELU(),
        nn.Linear(512, 128),
    )
    averages = {name: weight.detach().clone() for name, weight in encoder.named_parameters()}
    averaged, weights = list(averages.values()), list(encoder.parameters())
    optimizer = torch.optim.AdamW(weights, lr=4e-4, fused=True)

    gc.collect()
    gc.freeze()
    for step, (first, second) in zip(
        range(1, args.steps + 1), forever(loader), strict=False
    ):  # the training loop
        loss = contrast(encoder(first), encoder(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averaged, weights, 0.02)
        if step % 25 == 0:
            gc.collect()
        if step % 50 == 0:
            share = found(encoder, averages, held.tracks)
            print(f"step {step}: loss {loss.item():.3f}, found again {share:.2f}")


if __name__ == "__main__":
    main()
