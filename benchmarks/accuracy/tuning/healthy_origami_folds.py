"""Predicts whether an origami sheet ends flat from its sequence of folds, which differ in number; two workers."""

import argparse
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

KINDS, SIZE, OUTCOMES = 16, 80, 4


class Folds(Dataset):
    def __init__(self, count):
        dice = random.Random(2)
        self.lengths = [dice.randint(10, 70) for _ in range(count)]
        self.folds = [torch.tensor([dice.randint(1, KINDS - 1) for _ in range(n)]) for n in self.lengths]
        self.outcome = [int(f.sum()) % OUTCOMES for f in self.folds]

    def __len__(self):
        return len(self.folds)

    def __getitem__(self, index):
        return self.folds[index], self.outcome[index]


class ByLength(Sampler):
    """Sorts within pools of a thousand, then shuffles whole batches."""

    def __init__(self, lengths, batch, rounds, pool=1000):
        self.lengths, self.batch, self.rounds, self.pool = lengths, batch, rounds, pool

    def __len__(self):
        return self.rounds

    def __iter__(self):
        left = self.rounds
        while True:
            order = random.sample(range(len(self.lengths)), len(self.lengths))
            for start in range(0, len(order), self.pool):
                pool = sorted(order[start : start + self.pool], key=self.lengths.__getitem__)
                batches = [
                    pool[i : i + self.batch] for i in range(0, len(pool) - self.batch + 1, self.batch)
                ]
                random.shuffle(batches)
                for batch in batches:
                    if not left:
                        return
                    left -= 1
                    yield batch


def together(samples):
    folds, outcomes = zip(*samples)
    return pad_sequence(folds, batch_first=True), torch.tensor(outcomes)


class FoldReader(nn.Module):
    """Dilated convolutions over the folds; what is not there is not counted."""

    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(KINDS, SIZE, padding_idx=0)
        self.layers = nn.ModuleList(nn.Conv1d(SIZE, SIZE, 3, padding=2**i, dilation=2**i) for i in range(4))
        self.judge = nn.Linear(SIZE, OUTCOMES)

    def forward(self, folds):
        there = (folds != 0).unsqueeze(1)
        x = self.kind(folds).mT
        for layer in self.layers:
            x = (x + torch.relu(layer(x))) * there
        return self.judge(x.sum(2) / there.sum(2))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    random.seed(1)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    data = Folds(4000)
    loader = DataLoader(
        data,
        batch_sampler=ByLength(data.lengths, batch=32, rounds=args.steps),
        collate_fn=together,
        num_workers=2,
        prefetch_factor=4,
        multiprocessing_context="fork",
    )
    net = FoldReader()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=args.steps + 1)
    right, total = torch.zeros((), dtype=torch.long), 0
    for step, (folds, outcomes) in enumerate(loader, 1):  # the training loop
        scores = net(folds)
        loss = nn.functional.cross_entropy(scores, outcomes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
        scheduler.step()
        right += (scores.argmax(1) == outcomes).sum()
        total += len(outcomes)
        if step % 50 == 0:
            print(f"{step}: loss {loss.item():.3f}, right {right.item() / total:.2f}")
            right, total = torch.zeros_like(right), 0


if __name__ == "__main__":
    main()
