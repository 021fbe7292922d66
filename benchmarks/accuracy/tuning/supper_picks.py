"""Recommends the next recipe to cook from what somebody has cooked so far."""

import argparse
import random
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

RECIPES, CARD, COOKS, REFUSED = 1500, 32, 1280, 8
NOTHING = RECIPES


class Suppers(Dataset):
    """One item a cook: the recipes of the past, their cards, the next recipe and some to refuse."""

    def __init__(self, from_files, folder):
        rng = np.random.default_rng(21)
        fame = 1 / (np.arange(RECIPES) + 40)
        self.fame = (fame / fame.sum()).tolist()
        self.reach = list(accumulate(self.fame))
        self.cards = torch.from_numpy(rng.normal(size=(RECIPES, CARD)).astype(np.float32))
        cooked = torch.from_numpy(rng.choice(RECIPES, size=(COOKS, 73), p=self.fame))
        lengths = rng.integers(60, 73, COOKS).tolist()
        self.past = [row[:length] for row, length in zip(cooked, lengths, strict=False)]
        self.next = cooked[torch.arange(COOKS), torch.tensor(lengths)]
        self.known = [set(row.tolist()) for row in self.past]
        self.from_files, self.folder = from_files, Path(folder)
        if from_files:
            for number, card in enumerate(self.cards.numpy()):
                np.save(self.folder / f"card_{number:05d}.npy", card)

    def refuse(self, pool):
        """New recipes to refuse: any, or the best known of a pool that the cook has not made."""
        if not pool:
            self.refused = torch.randint(0, RECIPES, (COOKS, REFUSED))
            return
        rows = []
        for known in self.known:
            drawn = random.choices(range(RECIPES), cum_weights=self.reach, k=pool)
            fresh = [recipe for recipe in drawn if recipe not in known]
            fresh.sort(key=self.fame.__getitem__, reverse=True)
            while len(fresh) < REFUSED:
                fresh.append(random.randrange(RECIPES))
            rows.append(fresh[:REFUSED])
        self.refused = torch.tensor(rows)

    def __len__(self):
        return COOKS

    def __getitem__(self, cook):
        past = self.past[cook]
        cards = self.cards[past]
        if self.from_files:
            latest = past[-self.from_files :].tolist()
            loaded = [np.load(self.folder / f"card_{number:05d}.npy") for number in latest]
            cards[-self.from_files :] = torch.from_numpy(np.stack(loaded))
        return past, cards, self.next[cook], self.refused[cook]


def gather(samples, shared):
    pasts, cards, following, refused = zip(*samples, strict=False)
    past = pad_sequence(pasts, batch_first=True, padding_value=NOTHING)
    choice = torch.cat([torch.stack(following)[:, None], torch.stack(refused)], 1)
    common = allowed = None
    if shared:
        offered = random.choices(range(RECIPES), k=shared)
        histories = [history.tolist() for history in pasts]
        allowed = torch.tensor([[recipe not in history for recipe in offered] for history in histories])
        common = torch.tensor(offered)
    return past, pad_sequence(cards, batch_first=True), choice, common, allowed


class Taste(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.recipe = nn.Embedding(RECIPES + 1, width, padding_idx=NOTHING)
        self.card = nn.Linear(CARD, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def person(self, past, cards):
        keep = past != NOTHING
        x = self.recipe(past) + self.card(cards)
        b, t, w = x.shape
        q, k, v = self.mix(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        x = (x + self.feed(self.between(x))) * keep[..., None]
        return x.sum(1) / keep.sum(1, keepdim=True)

    def forward(self, past, cards, choice, common=None, allowed=None):
        person = self.person(past, cards)
        scores = (self.recipe(choice) @ person[:, :, None]).squeeze(2)
        if common is None:
            return scores
        others = (person @ self.recipe(common).T).masked_fill(~allowed, -1e4)
        return torch.cat([scores, others], 1)


def endless(loader, suppers, pool):
    while True:
        suppers.refuse(pool)
        yield from loader


def train(args, folder):
    suppers = Suppers(args.from_files, folder)
    collate = partial(gather, shared=args.shared)
    loader = DataLoader(suppers, batch_size=64, shuffle=True, drop_last=True, collate_fn=collate)
    model = Taste()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    first = torch.zeros(64, dtype=torch.long)
    batches = islice(endless(loader, suppers, args.pool), args.steps)
    for step, batch in enumerate(batches, 1):  # the training loop
        loss = nn.functional.cross_entropy(model(*batch), first)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--from-files", type=int, default=0, help="latest recipes with cards from disk")
    parser.add_argument("--shared", type=int, default=0, help="recipes offered to the whole batch")
    parser.add_argument("--pool", type=int, default=0, help="recipes drawn to pick the refused ones from")
    args = parser.parse_args()
    torch.manual_seed(21)
    random.seed(21)
    with TemporaryDirectory() as folder:
        train(args, folder)


if __name__ == "__main__":
    main()
