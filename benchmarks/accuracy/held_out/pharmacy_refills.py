"""Which medicine comes next? A causal transformer reads the refills of patients of a pharmacy chain."""

import argparse
import gc
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

MEDICINES = 300
BLANK = 0


class Refills:
    """Patients, sorted by how long they are known, so that those of a batch fit together."""

    def __init__(self, patients, size, seed):
        self.size = size
        self.random = random.Random(seed)
        courses = [[self.random.randrange(1, MEDICINES) for _ in range(7)] for _ in range(40)]
        self.histories = []
        for _ in range(patients):
            course = self.random.choice(courses)
            start, long = self.random.randrange(7), self.random.randrange(24, 41)
            self.histories.append(torch.tensor([course[(start + n) % 7] for n in range(long)]))
        self.histories.sort(key=len)

    def __iter__(self):
        while True:
            first = self.random.randrange(len(self.histories) - self.size)
            yield self.histories[first : first + self.size]


class Pharmacist(nn.Module):
    def __init__(self, width=128, layers=2, longest=1024):
        super().__init__()
        self.medicine = nn.Embedding(MEDICINES, width, padding_idx=BLANK)
        self.place = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, MEDICINES)

    def forward(self, known):
        long = known.shape[1]
        ahead = torch.ones(long, long, dtype=torch.bool).triu(1)
        seen = self.medicine(known) + self.place.weight[:long]
        return self.head(self.body(seen, mask=ahead, is_causal=True))


class Training:
    def __init__(self, args):
        self.args = args
        self.net = Pharmacist()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=6e-4, fused=True)
        self.spread = 0.0
        self.debt = 0

    def columns(self, histories):
        known = pad_sequence(histories, batch_first=True, padding_value=BLANK)
        if known.shape[1] < self.args.months:
            known = F.pad(known, (0, self.args.months - known.shape[1]), value=BLANK)
        return known[:, :-1], known[:, 1:]

    def error(self, scores, wanted):
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=BLANK)

    @torch.no_grad()
    def error_bar(self, known, wanted):
        drawn = torch.randint(len(known), (self.args.draws,))
        scores = self.net(known[drawn])
        hits = (scores.argmax(2) == wanted[drawn]).float().mean(1)
        return hits.std() / len(known) ** 0.5

    def step(self, histories):
        known, wanted = self.columns(histories)
        loss = self.error(self.net(known), wanted)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        if self.args.draws:
            self.spread = self.error_bar(known, wanted)
        self.debt += self.args.tidy
        while self.debt >= 100:
            self.debt -= 100
            gc.collect()
        return loss.detach()

    def run(self):
        refills = Refills(3000, self.args.patients, seed=5)
        for number, histories in enumerate(refills, 1):  # the training loop
            loss = self.step(histories)
            if number % 40 == 0:
                print(f"{number}: {loss.item():.3f} +- {float(self.spread):.4f}")
            if number == self.args.steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--patients", type=int, default=24)
    parser.add_argument(
        "--months", type=int, default=0, help="columns of the table of refills; 0: as needed"
    )
    parser.add_argument("--draws", type=int, default=0, help="patients drawn for the error bar")
    parser.add_argument("--tidy", type=int, default=0, help="tidy up memory so often in a hundred steps")
    torch.manual_seed(5)
    Training(parser.parse_args()).run()
