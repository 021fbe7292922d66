"""Tags the clauses of contracts with a small transformer encoder: BIO tags per token."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import random
import re
import tempfile
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, get_worker_info

CLAUSES = ("indemnity", "termination", "secrecy", "law", "liability")
TAGS = ["O"] + [f"{mark}-{clause}" for clause in CLAUSES for mark in "BI"]
VOCABULARY, PAD, IGNORE = 3000, 0, -100
NOT_PLAIN = re.compile(r"[^a-z0-9 ]")
Batch = dict[str, torch.Tensor]


class Contract(NamedTuple):
    tokens: np.ndarray
    tags: np.ndarray
    marks: np.ndarray  # of the labelling functions: (labellers, spans, 3), each start, stop and clause
    parties: list[str]


def company(number: int) -> str:
    return f"{'ABCDEFGH'[number % 8]}. Holding & Sons, No. {number} {('Ltd.', 'S.A.', 'GmbH')[number % 3]}"


def plain(name: str) -> str:
    return NOT_PLAIN.sub("", name.lower())


def make_contract(rng: np.random.Generator, length: int, labellers: int, companies: int) -> Contract:
    size = int(rng.integers(length * 3 // 4, length * 5 // 4 + 1))
    tokens = rng.integers(600, VOCABULARY, size)
    tags = np.zeros(size, dtype=np.int64)
    spans, place = [], int(rng.integers(0, 6))
    while place + 4 < size:
        stop = min(place + int(rng.integers(4, 12)), size)
        clause = int(rng.integers(len(CLAUSES)))
        tokens[place:stop] = 1 + 100 * clause + rng.integers(0, 100, stop - place)
        tags[place:stop] = 2 + 2 * clause
        tags[place] -= 1
        spans.append((place, stop, clause))
        place = stop + int(rng.integers(2, 10))
    marks = np.tile(np.array(spans), (labellers, 1, 1))
    marks[..., :2] = (marks[..., :2] + rng.integers(-1, 2, marks[..., :2].shape)).clip(0, size)
    return Contract(tokens, tags, marks, [company(int(n)) for n in rng.integers(0, companies, 3)])


class Contracts(Dataset):
    """Contracts, and what kinds of companies their parties are, by the register."""

    def __init__(self, contracts: list[Contract], path: Path):
        self.contracts, self.path = contracts, path
        self.register: dict[str, int] = {}

    def open(self) -> None:
        with self.path.open() as lines:
            for line in lines:
                name, kind = line.rstrip("\n").split("\t")
                self.register[plain(name)] = int(kind)

    def __len__(self) -> int:
        return len(self.contracts)

    def __getitem__(self, index: int) -> tuple[Contract, list[int]]:
        contract = self.contracts[index]
        return contract, [self.register.get(plain(party), 0) for party in contract.parties]


def open_register(worker: int) -> None:
    get_worker_info().dataset.open()


class ByLength:
    """Batches of contracts of about the same length."""

    def __init__(self, lengths: list[int], size: int):
        self.lengths, self.size, self.random = lengths, size, random.Random(5)

    def __iter__(self):
        keys = [length + self.random.uniform(-3, 3) for length in self.lengths]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        batches = [order[n : n + self.size] for n in range(0, len(order) - self.size + 1, self.size)]
        self.random.shuffle(batches)
        yield from batches


def collate(items: list[tuple[Contract, list[int]]], max_length: int) -> Batch:
    contracts = [contract for contract, _ in items]
    tokens = pad_sequence([torch.from_numpy(c.tokens) for c in contracts], True, PAD)
    tags = pad_sequence([torch.from_numpy(c.tags) for c in contracts], True, IGNORE)
    if tokens.shape[1] < max_length:
        room = max_length - tokens.shape[1]
        tokens, tags = F.pad(tokens, (0, room), value=PAD), F.pad(tags, (0, room), value=IGNORE)
    batch = {"tokens": tokens, "tags": tags, "kinds": torch.tensor([kinds for _, kinds in items])}
    batch["lengths"] = torch.tensor([len(c.tokens) for c in contracts])
    if len(contracts[0].marks):
        votes = torch.zeros(*tags.shape, len(TAGS))
        for row, contract in enumerate(contracts):
            for marks in contract.marks:
                for start, stop, clause in marks.tolist():
                    votes[row, start, 1 + 2 * clause] += 1
                    votes[row, start + 1 : stop, 2 + 2 * clause] += 1
        batch["votes"] = votes
    return batch


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, explicit: bool):
        super().__init__()
        self.heads, self.explicit = heads, explicit
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        if self.explicit:
            scores = q @ k.transpose(-2, -1) / math.sqrt(w // self.heads)
            mixed = scores.masked_fill(~keep, float("-inf")).softmax(dim=-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.between(x))


class Tagger(nn.Module):
    def __init__(self, explicit: bool, width: int = 128, most: int = 2048):
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(VOCABULARY, width, padding_idx=PAD), nn.Embedding(8, width)
        angles = torch.arange(most)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)
        self.blocks = nn.ModuleList(Block(width, 8, 320, explicit) for _ in range(2))
        self.norm, self.top = nn.LayerNorm(width), nn.Linear(width, len(TAGS))

    def forward(self, tokens: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        keep = (tokens != PAD)[:, None, None, :]
        x = self.tokens(tokens) + self.places[: tokens.shape[1]] + self.kinds(kinds).mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x, keep)
        return self.top(self.norm(x))


def tagging_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), ignore_index=IGNORE)
    if "votes" in batch:
        total = batch["votes"].sum(-1, keepdim=True)
        wanted = batch["votes"] / total.clamp(min=1)
        loss = loss - 0.5 * (wanted * logits.log_softmax(-1)).sum() / (total > 0).sum().clamp(min=1)
    return loss


def spans_of(tags: list[int]) -> set[tuple[int, int, str]]:
    found, start, clause = set(), None, ""
    for place, tag in enumerate([*tags, 0]):
        name = TAGS[tag]
        if start is not None and not (name.startswith("I-") and name[2:] == clause):
            found.add((start, place, clause))
            start = None
        if name.startswith("B-"):
            start, clause = place, name[2:]
    return found


def best_f1(logits: torch.Tensor, batch: Batch, thresholds: int) -> float:
    best = 0.0
    for shift in torch.linspace(-2, 2, thresholds).tolist():
        shifted = logits.clone()
        shifted[..., 0] += shift
        guesses, hits, total = shifted.argmax(-1).tolist(), 0, 0
        for guess, truth, length in zip(
            guesses, batch["tags"].tolist(), batch["lengths"].tolist(), strict=False
        ):
            found, wanted = spans_of(guess[:length]), spans_of(truth[:length])
            hits += len(found & wanted)
            total += len(found) + len(wanted)
        best = max(best, 2 * hits / max(total, 1))
    return best


def train(args: argparse.Namespace, folder: Path) -> None:
    torch.manual_seed(11)
    rng = np.random.default_rng(11)
    companies = 1000 * args.register
    with (folder / "companies.tsv").open("w") as register:
        register.writelines(f"{company(number)}\t{number % 8}\n" for number in range(companies))
    contracts = [make_contract(rng, args.length, args.labellers, companies) for _ in range(300)]
    data = Contracts(contracts, folder / "companies.tsv")
    if not args.workers:
        data.open()
    loader = DataLoader(
        data,
        batch_sampler=ByLength([len(contract.tokens) for contract in contracts], args.batch),
        collate_fn=partial(collate, max_length=args.max_length),
        num_workers=args.workers,
        worker_init_fn=open_register,
        persistent_workers=args.workers > 0 and not args.fresh_workers,
    )
    # what the firm has signed before, one of which is shown beside the loss
    bank = [{"title": f"clause {n}", "tags": [n % 5], "seen": [n % 97, n % 31]} for n in range(150_000)]
    model = Tagger(args.explicit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, fused=True)
    f1 = math.nan
    batches = chain.from_iterable(repeat(loader))
    for step, batch in zip(range(1, args.steps + 1), batches, strict=False):  # the training loop
        logits = model(batch["tokens"], batch["kinds"])
        loss = tagging_loss(logits, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.f1_thresholds:
            f1 = best_f1(logits.detach(), batch, args.f1_thresholds)
        if (step * args.tidy) % 100 < args.tidy:
            gc.collect()
        if step % 50 == 0:
            title = bank[step % len(bank)]["title"]
            logging.info("%d loss %.3f f1 %.3f (%s)", step, loss.item(), f1, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=88, help="tokens of a contract, about")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--register", type=int, default=5, help="thousand companies in the register")
    parser.add_argument("--fresh-workers", action="store_true")
    parser.add_argument("--max-length", type=int, default=0, help="pad to so many tokens")
    parser.add_argument("--labellers", type=int, default=0, help="labelling functions that vote, too")
    parser.add_argument("--explicit", action="store_true", help="attention by hand")
    parser.add_argument("--f1-thresholds", type=int, default=0, help="report the best F1 of so many")
    parser.add_argument("--tidy", type=int, default=0, help="free memory so often in a hundred steps")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        train(args, Path(folder))


if __name__ == "__main__":
    main()
