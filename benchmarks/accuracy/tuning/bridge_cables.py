"""Tension in the cables of suspension bridges: messages along the members of a truss, from joint to joint."""

import argparse
import ctypes
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Truss(NamedTuple):
    joints: Tensor
    ends: Tensor
    members: Tensor
    tension: Tensor


def trusses(amount: int, joints: int, members: int, seed: int) -> list[Truss]:
    rng = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(amount):
        place = torch.randn(joints, 6, generator=rng)
        ends = torch.randint(joints, (2, members), generator=rng)
        stretch = (place[ends[0], :3] - place[ends[1], :3]).norm(dim=1, keepdim=True)
        made.append(Truss(place, ends, stretch, torch.tanh(stretch - 1.5)))
    return made


class Passing(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(3 * width, width), nn.SiLU(), nn.LayerNorm(width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.LayerNorm(width))

    def forward(self, joints: Tensor, ends: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
        start, end = ends
        members = members + self.message(torch.cat([joints[start], joints[end], members], 1))
        heard = torch.zeros_like(joints).index_add_(0, end, members)
        return joints + self.update(torch.cat([joints, heard], 1)), members


class BridgeNet(nn.Module):
    def __init__(self, width: int = 32, rounds: int = 3):
        super().__init__()
        self.joint, self.member = nn.Linear(6, width), nn.Linear(1, width)
        self.rounds = nn.ModuleList(Passing(width) for _ in range(rounds))
        self.tension = nn.Linear(width, 1)

    def forward(self, truss: Truss) -> Tensor:
        joints, members = self.joint(truss.joints), self.member(truss.members)
        for passing in self.rounds:
            joints, members = passing(joints, truss.ends, members)
        return self.tension(members)


def modest(blocks: int) -> None:
    """Blocks from this many kilobytes on do not stay with the process: others want the memory, too."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, blocks * 1024)


def cycle(items):
    while True:
        order = torch.randperm(len(items)).tolist()
        yield from (items[n] for n in order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--members", type=int, default=2400, help="of a truss; there are three for a joint")
    parser.add_argument("--modest", type=int, default=0, help="kilobytes of a block that is not kept")
    parser.add_argument("--cores", type=int, default=0, help="cores to compute on; 0: as torch likes")
    parser.add_argument("--rate", type=float, default=2e-3)
    args = parser.parse_args()

    torch.manual_seed(14)
    if args.modest:
        modest(args.modest)
    if args.cores:
        torch.set_num_threads(args.cores)
    net = BridgeNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.rate, fused=True)
    data = cycle(trusses(24, max(4, args.members // 3), args.members, seed=3))
    running = torch.zeros(())
    for step, truss in zip(range(1, args.steps + 1), data):  # the training loop
        loss = nn.functional.smooth_l1_loss(net(truss), truss.tension)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running.lerp_(loss.detach(), 0.05)
        if step % 50 == 0:
            print(f"{step:5d}  {running.item():.5f}")


if __name__ == "__main__":
    main()
