"""Sorts support tickets by topic. A word is shown by random pieces of it, so that typos do little harm."""

from __future__ import annotations

import argparse
import difflib
import itertools
import random
import re
import string
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

TICKETS, TOPICS, RARE = 2048, 6, 32
PIECES, BUCKETS = 10, 8192
WORDS_PER_BATCH = 2400


@dataclass
class Mention:
    """A product, person or order number that a ticket names."""

    text: str
    first: int
    last: int
    kind: str


# ---------------------------------------------------------------------------------- tickets


def invent(count: int, dice: random.Random) -> list[str]:
    return ["".join(dice.choices(string.ascii_lowercase, k=dice.randint(4, 9))) for _ in range(count)]


def pieces(word: bytes) -> list[int]:
    """Numbers of random parts of a word."""
    dice, last = random.random, len(word) - 2
    starts = [int(dice() * last) for _ in range(PIECES)]
    return [crc32(word[at : at + 2 + int(dice() * 3)]) % (BUCKETS - 1) + 1 for at in starts]


def mark(words: list[str]) -> list[bytes]:
    return [b"<" + word.encode() + b">" for word in words]


class Tickets(Dataset):
    def __init__(self, options: Namespace) -> None:
        dice = random.Random(17)
        language = invent(3000, dice)
        jargon = [dice.sample(language, 60) for _ in range(TOPICS)]
        sizes = [dice.randint(24, 56) for _ in range(TICKETS)]
        if options.escalated:
            sizes += [options.escalated] * RARE
        self.topics = [dice.randrange(TOPICS) for _ in sizes]
        self.texts = [
            dice.choices(language, k=size - size // 3) + dice.choices(jargon[topic], k=size // 3)
            for size, topic in zip(sizes, self.topics, strict=True)
        ]
        self.marked = [mark(words) for words in self.texts]
        self.sizes = np.array(sizes)
        self.store_seconds = options.store / 1000
        self.dictionary = invent(options.dictionary, dice)
        self.names = [re.compile(rf"\b{name}\b") for name in dice.sample(language, options.names)]
        self.public = lru_cache(maxsize=256)(self.redact)  # tickets come again
        self.annotations = [
            [Mention(dice.choice(language), at, at + 1, "order") for at in range(options.mentions)]
            for _ in range(128)
        ]

    def __len__(self) -> int:
        return len(self.texts)

    def redact(self, number: int) -> list[bytes]:
        """Customers' names must not reach the model."""
        text = " ".join(self.texts[number])
        for name in self.names:
            text = name.sub("customer", text)
        return mark(text.split())

    def spell(self, word: str) -> str:
        return next(iter(difflib.get_close_matches(word, self.dictionary, n=1, cutoff=0.8)), word)

    def words(self, number: int) -> list[bytes]:
        if self.names:
            return self.public(number)
        if self.dictionary and number % 512 == 7:  # came by letter, and was read by a machine
            return mark([self.spell(word) for word in self.texts[number]])
        return self.marked[number]

    def __getitem__(self, number: int) -> tuple[np.ndarray, int, list[Mention]]:
        if self.store_seconds:
            time.sleep(self.store_seconds)
        shown = np.array([pieces(word) for word in self.words(number)])
        return shown, self.topics[number], self.annotations[number % 128]


class AlikeInSize(Sampler):
    """Shuffled batches of about as many words each, in which tickets are of about the same size."""

    def __init__(self, sizes: np.ndarray, escalated: bool) -> None:
        self.sizes, self.escalated = sizes[:TICKETS], escalated
        self.rng = np.random.default_rng(29)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.argsort(self.sizes + self.rng.random(TICKETS))
        batches: list[list[int]] = [[]]
        for number in order.tolist():
            if (len(batches[-1]) + 1) * self.sizes[number] > WORDS_PER_BATCH:
                batches.append([])
            batches[-1].append(number)
        for batch in self.rng.permutation(len(batches)):
            # An escalated ticket in each batch, or the model would hardly ever see one.
            yield batches[batch] + ([TICKETS + int(self.rng.integers(RARE))] if self.escalated else [])


def rarity(tickets: list[np.ndarray], rivals: int) -> list[float]:
    """Weights that are lower for tickets which say what others of their batch say, too."""
    bags = [Counter(ticket.ravel().tolist()) for ticket in tickets]
    weights = []
    for bag in bags:
        shared = sum((bag & rival).total() for rival in random.choices(bags, k=rivals))
        weights.append(1 / (1 + shared / (rivals * bag.total())))
    return weights


@dataclass
class Batch:
    pieces: Tensor
    sizes: Tensor
    topics: Tensor
    weights: Tensor
    mentions: list[list[Mention]]


def bundle(samples: list[tuple[np.ndarray, int, list[Mention]]], rivals: int) -> Batch:
    tickets, topics, mentions = zip(*samples, strict=True)
    sizes = torch.tensor([len(ticket) for ticket in tickets])
    table = torch.zeros(len(tickets), int(sizes.max()), PIECES, dtype=torch.int64)
    for row, ticket in zip(table, tickets, strict=True):
        row[: len(ticket)] = torch.from_numpy(ticket)
    weights = torch.tensor(rarity(tickets, rivals)) if rivals else torch.ones(len(tickets))
    return Batch(table, sizes, torch.tensor(topics), weights, list(mentions))


def sign_in(_: int, milliseconds: float) -> None:
    """Each process needs a session of its own at the ticket service."""
    random.seed(get_worker_info().seed)
    time.sleep(milliseconds / 1000)


class Feed:
    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.tickets = Tickets(options)

    def open(self) -> DataLoader:
        return DataLoader(
            self.tickets,
            batch_sampler=AlikeInSize(self.tickets.sizes, bool(self.options.escalated)),
            collate_fn=partial(bundle, rivals=self.options.rivals),
            num_workers=2,
            persistent_workers=True,
            worker_init_fn=partial(sign_in, milliseconds=self.options.session),
        )

    @cached_property
    def first(self) -> DataLoader:
        return self.open()

    @property
    def loader(self) -> DataLoader:
        """With reseeding, workers draw other pieces in each pass, whatever pass they were started in."""
        return self.open() if self.options.reseed else self.first

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.loader


# ---------------------------------------------------------------------------------- model


class TopicNet(nn.Module):
    def __init__(self, width: int = 80, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(BUCKETS, width, mode="sum", padding_idx=0)
        self.mix = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=1) for _ in range(depth))
        self.heed = nn.Conv1d(width, 1, 1)
        self.name = nn.Linear(width, TOPICS)

    def forward(self, table: Tensor, sizes: Tensor) -> Tensor:
        x = self.embed(table.flatten(0, 1)).view(*table.shape[:2], -1).transpose(1, 2)
        for mix in self.mix:
            x = x + F.glu(mix(x), dim=1)
        outside = torch.arange(table.shape[1]) >= sizes[:, None]
        heed = self.heed(x).squeeze(1).masked_fill(outside, -torch.inf).softmax(1)
        return self.name((x @ heed.unsqueeze(2)).squeeze(2))


def train(options: Namespace) -> None:
    torch.manual_seed(8)
    torch.set_num_threads(1)  # the workers are busy, too
    model = TopicNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for step, batch in enumerate(itertools.islice(Feed(options), options.steps), 1):  # the training loop
        losses = F.cross_entropy(model(batch.pieces, batch.sizes), batch.topics, reduction="none")
        loss = (losses * batch.weights).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"{step}: {loss.item():.3f}, {sum(map(len, batch.mentions))} mentions")


def parse() -> Namespace:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=200)
    cli.add_argument("--escalated", type=int, default=0, help="words of an escalated ticket, one a batch")
    cli.add_argument("--rivals", type=int, default=0, help="tickets that each is weighed against")
    cli.add_argument("--names", type=int, default=0, help="customers whose names are taken out")
    cli.add_argument("--dictionary", type=int, default=0, help="words to correct tickets by letter with")
    cli.add_argument("--mentions", type=int, default=0, help="mentions that come with a ticket")
    cli.add_argument("--session", type=float, default=0.0, help="ms to sign in at the ticket service")
    cli.add_argument("--reseed", action="store_true", help="other random pieces in each pass")
    cli.add_argument("--store", type=float, default=0.0, help="ms in which the store answers")
    return cli.parse_args()


if __name__ == "__main__":
    train(parse())
