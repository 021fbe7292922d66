"""Which articles of law does a ruling cite? Rulings of like length share a batch; two workers feed it."""

import argparse
from itertools import chain, islice, repeat

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

VOCABULARY, ARTICLES, PAD, BLANK = 6000, 40, 0, 1


class Rulings(Dataset):
    def __init__(self, amount, seed):
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(100, 160, amount)
        self.ends = np.cumsum(self.lengths)
        self.tokens = rng.integers(2, VOCABULARY, self.ends[-1])
        self.cited = np.zeros((amount, ARTICLES), dtype=np.float32)
        for row, end, length in zip(self.cited, self.ends, self.lengths, strict=False):
            row[self.tokens[end - length : end : 20] % ARTICLES] = 1.0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, number):
        end = self.ends[number]
        words = self.tokens[end - self.lengths[number] : end].copy()
        words[np.random.random(len(words)) < 0.05] = BLANK
        return torch.from_numpy(words), torch.from_numpy(self.cited[number])


class LikeLengths(Sampler):
    """Batches of neighbours in length, out of random stretches of the whole."""

    def __init__(self, lengths, size, stretch=20):
        self.lengths, self.size, self.stretch = lengths, size, stretch

    def __len__(self):
        return len(self.lengths) // self.size

    def __iter__(self):
        order = torch.randperm(len(self.lengths)).numpy()
        batches = []
        for part in np.array_split(order, max(1, len(self) // self.stretch)):
            part = part[np.argsort(self.lengths[part])]
            usable = len(part) // self.size * self.size
            batches.extend(part[:usable].reshape(-1, self.size).tolist())
        for which in torch.randperm(len(batches)).tolist():
            yield batches[which]


def collate(samples):
    words, cited = zip(*samples, strict=False)
    return nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PAD), torch.stack(cited)


class Citations(nn.Module):
    def __init__(self, width=96, channels=128):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.near = nn.Conv1d(width, channels, 5, padding=2, bias=False)
        self.wide = nn.Conv1d(channels, channels, 5, padding=4, dilation=2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm1d(channels) for _ in range(2)])
        self.verdict = nn.Sequential(nn.Linear(channels, 128), nn.ReLU(), nn.Linear(128, ARTICLES))

    def forward(self, words):
        x = self.words(words).transpose(1, 2)
        x = torch.relu(self.norms[0](self.near(x)))
        x = x + torch.relu(self.norms[1](self.wide(x)))
        x = x.masked_fill((words == PAD)[:, None], 0.0)
        return self.verdict(x.amax(2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(77)
    rulings = Rulings(1600, seed=77)
    loader = DataLoader(
        rulings,
        batch_sampler=LikeLengths(rulings.lengths, 16),
        collate_fn=collate,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=4,
    )
    model = Citations()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    epochs = chain.from_iterable(repeat(loader))
    for step, (words, cited) in enumerate(islice(epochs, steps), 1):  # the training loop
        loss = nn.functional.binary_cross_entropy_with_logits(model(words), cited)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
