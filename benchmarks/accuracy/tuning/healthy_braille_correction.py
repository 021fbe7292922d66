"""Corrects braille typing of uneven length. Lines of about one length go together; two batches make a step."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

CELLS = 64


def typed(amount, seed):
    """Lines of 10 to 40 cells, some of which slipped."""
    source = torch.Generator().manual_seed(seed)
    lines = []
    for length in torch.randint(10, 41, (amount,), generator=source).tolist():
        meant = torch.randint(CELLS, (length,), generator=source)
        meant[1::2] = (meant[::2][: length // 2] * 5 + 3) % CELLS
        slipped = torch.rand(length, generator=source) < 0.15
        got = torch.where(slipped, meant ^ 4, meant)
        lines.append((got, meant))
    return sorted(lines, key=lambda line: len(line[0]))


def batches(lines, size):
    """Neighbours by length, in random order, without end."""
    parts = [lines[n : n + size] for n in range(0, len(lines), size)]
    packed = [tuple(pack_sequence(side, enforce_sorted=False) for side in zip(*part)) for part in parts]
    while True:
        for n in torch.randperm(len(packed)).tolist():
            yield packed[n]


class Corrector(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.cells = nn.Embedding(CELLS, width)
        self.read = nn.GRU(width, width, bidirectional=True)
        self.leave = nn.Linear(2 * width, CELLS)

    def forward(self, got):
        seen, _ = self.read(got._replace(data=self.cells(got.data)))
        return got._replace(data=self.leave(seen.data))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(26)
    corrector = Corrector()
    optimizer = torch.optim.AdamW(corrector.parameters(), lr=4e-3, fused=True)
    source = batches(typed(1200, seed=5), args.batch)
    for step in range(1, args.steps + 1):  # the training loop
        for _ in range(args.accumulate):
            got, meant = next(source)
            logits = corrector(got)
            loss = nn.functional.cross_entropy(logits.data, meant.data)
            (loss / args.accumulate).backward()
        nn.utils.clip_grad_norm_(corrector.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            line = unpack_sequence(logits)[0].argmax(1)
            wrong = (line != unpack_sequence(meant)[0]).sum().item()
            print(f"step {step}: loss {loss.item():.3f}, {wrong} of {len(line)} cells wrong in one line")


if __name__ == "__main__":
    main()
