"""Predicts the next entry of bookkeeping ledgers. Ledgers differ in length: a batch is as many of like
length as fit into a budget of entries, and one worker decodes and perturbs the next ones meanwhile.
"""

import argparse
import collections
import random
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

ACCOUNTS = 512
ENTRY = struct.Struct("<Hhf")  # account, days since the last entry, amount
PAD = -100


class Ledgers(Dataset):
    """Packed ledgers; a batch is fetched as a whole."""

    def __init__(self, count: int, longest: int) -> None:
        self.dice = dice = np.random.default_rng(23)
        self.lengths = dice.integers(16, longest, count).tolist()
        self.packed = [zlib.compress(self._invent(dice, length), 1) for length in self.lengths]

    @staticmethod
    def _invent(dice: np.random.Generator, length: int) -> bytes:
        accounts = np.cumsum(dice.integers(1, 5, length)) % ACCOUNTS
        days, amounts = dice.integers(0, 30, length), dice.lognormal(4, 2, length)
        rows = zip(accounts.tolist(), days.tolist(), amounts.tolist(), strict=True)
        return b"".join(ENTRY.pack(*row) for row in rows)

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self._decode(self.packed[number]) for number in numbers]

    def _decode(self, packed: bytes) -> tuple[Tensor, Tensor]:
        entries = list(ENTRY.iter_unpack(zlib.decompress(packed)))
        accounts = torch.tensor([account for account, _, _ in entries])
        facts = np.empty((len(entries), 4), dtype=np.float32)
        today, last, balance = 0, {}, collections.Counter()
        for row, (account, days, amount) in enumerate(entries):
            today += days
            balance[account] += amount
            facts[row] = days, today - last.get(account, today), amount, balance[account]
            last[account] = today
        facts[:, 2:] *= self.dice.uniform(0.8, 1.25)  # another currency
        return accounts, torch.from_numpy(np.log1p(facts))


class Budget(Sampler[list[int]]):
    """Endless batches of ledgers of like length, of about the same number of entries each."""

    def __init__(self, lengths: list[int], entries: int) -> None:
        self.lengths, self.entries = lengths, entries

    def __iter__(self) -> Iterator[list[int]]:
        dice = random.Random(31)
        batches = list(self._cut())
        while True:
            dice.shuffle(batches)
            yield from batches

    def _cut(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for number in sorted(range(len(self.lengths)), key=self.lengths.__getitem__):
            if batch and (len(batch) + 1) * self.lengths[number] > self.entries:
                yield batch
                batch = []
            batch.append(number)
        # what is left over would be a small batch


def pad(ledgers: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    accounts, facts = zip(*ledgers, strict=True)
    following = [row[1:] for row in accounts]
    return (
        pad_sequence([row[:-1] for row in accounts], batch_first=True),
        pad_sequence([row[:-1] for row in facts], batch_first=True),
        pad_sequence(following, batch_first=True, padding_value=PAD),
    )


class NextEntry(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.account = nn.Embedding(ACCOUNTS, width)
        self.facts = nn.Linear(4, width)
        self.recall = nn.GRU(width, width, batch_first=True)
        self.guess = nn.Linear(width, ACCOUNTS)

    def forward(self, accounts: Tensor, facts: Tensor) -> Tensor:
        states, _ = self.recall(self.account(accounts) + self.facts(facts))
        return self.guess(states)


def train(steps: int) -> float:
    torch.manual_seed(41)
    ledgers = Ledgers(count=10_000, longest=64)
    loader = DataLoader(
        ledgers,
        batch_sampler=Budget(ledgers.lengths, entries=1536),
        collate_fn=pad,
        num_workers=1,
        prefetch_factor=4,
    )
    model = NextEntry(width=128)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    total = torch.zeros(())
    for _, (accounts, facts, following) in zip(range(steps), loader, strict=False):  # the training loop
        loss = criterion(model(accounts, facts).flatten(0, 1), following.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return total.item() / steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    print(f"mean loss {train(parser.parse_args().steps):.3f}")
