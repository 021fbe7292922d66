"""Next byte of a made-up log format, learnt on two islands that meet every few steps only.

Each rank trains a copy with its own optimizer. At a meeting, the mean of what the copies have learnt
since the last one is one step of an outer optimizer, from which all copies go on (DiLoCo).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

CONTEXT, BYTES, MEETING = 16, 256, 20


def made_up_log(island: int, length: int) -> torch.Tensor:
    """Bytes that mostly follow from the one before and the one eight places back."""
    dice = torch.Generator().manual_seed(island)
    table = torch.randint(BYTES, (BYTES, 8), generator=torch.Generator().manual_seed(99))
    rows = torch.randint(BYTES, (length // 64, 64), generator=dice)
    for column in range(8, 64):
        rows[:, column] = table[rows[:, column - 1], rows[:, column - 8] % 8]
    return rows.flatten().to(torch.uint8)


class NextByte(nn.Module):
    def __init__(self, width: int = 512):
        super().__init__()
        self.letters = nn.Embedding(BYTES, 32)
        self.enter = nn.Linear(CONTEXT * 32, width)
        self.deeper = nn.Linear(width, width)
        self.leave = nn.Linear(width, BYTES)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.enter(self.letters(context).flatten(1)))
        return self.leave(h + F.gelu(self.deeper(h)))


class Meeting:
    """The outer optimizer: Nesterov momentum on the mean of all islands' ways."""

    def __init__(self, model: nn.Module, rate: float = 0.7, momentum: float = 0.9):
        self.model, self.rate, self.momentum = model, rate, momentum
        self.start = parameters_to_vector(model.parameters()).detach().clone()
        self.velocity = torch.zeros_like(self.start)

    @torch.no_grad()
    def hold(self) -> None:
        way = self.start - parameters_to_vector(self.model.parameters())
        dist.all_reduce(way)
        way /= dist.get_world_size()
        self.velocity.mul_(self.momentum).add_(way)
        self.start -= self.rate * (way + self.momentum * self.velocity)
        vector_to_parameters(self.start.clone(), self.model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=211)
    steps = parser.parse_args().steps

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = NextByte()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    meeting = Meeting(model)
    pages = made_up_log(rank, 1 << 19).unfold(0, CONTEXT + 1, 1)
    dice = torch.Generator().manual_seed(70 + rank)
    tail = torch.zeros(())
    for step in range(1, steps + 1):  # the training loop
        window = pages[torch.randint(len(pages), (256,), generator=dice)].long()
        loss = F.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        inner.step()
        inner.zero_grad()
        tail = tail.lerp(loss.detach(), 0.1)
        if step % MEETING == 0:
            meeting.hold()
    print(f"island {rank}: {tail.item():.3f} nats")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
