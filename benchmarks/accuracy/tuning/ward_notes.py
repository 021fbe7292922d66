"""Sort the notes of a clinic by urgency: a small encoder, pretrained elsewhere, and a head on top.

Stage 1 trains the head; stage 2, the encoder's upper blocks, is another script.
"""

import argparse
import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 4000
PAD = 0
CLASSES = 5
LONGEST = 48


@dataclass
class Corpus:
    notes: list = field(default_factory=list)
    urgency: list = field(default_factory=list)

    @classmethod
    def synthesise(cls, count, rng):
        corpus = cls()
        lengths = rng.integers(24, LONGEST + 1, count)
        for length in np.sort(lengths):
            kind = int(rng.integers(CLASSES))
            words = rng.integers(1, VOCABULARY, int(length))
            words[rng.random(len(words)) < 0.2] = 1 + kind * 7
            corpus.notes.append(words)
            corpus.urgency.append(kind)
        return corpus


class Encoder(nn.Module):
    def __init__(self, width=128, depth=6):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.places = nn.Parameter(torch.randn(512, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )

    def forward(self, ids):
        padding = torch.zeros(ids.shape, dtype=torch.float32).masked_fill(ids == PAD, -1e9)
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return x


class Head(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.weigh = nn.Linear(width, 1)
        self.out = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES))

    def forward(self, x, ids):
        weights = self.weigh(x).squeeze(-1).masked_fill(ids == PAD, -1e9).softmax(-1)
        return self.out((weights[..., None] * x).sum(1))


class Classifier(nn.Module):
    def __init__(self, unfreeze):
        super().__init__()
        self.encoder = Encoder()
        self.head = Head()
        self.encoder.requires_grad_(False)
        # the upper blocks are what stage 2 continues with
        for block in list(self.encoder.blocks)[::-1][:unfreeze]:
            block.requires_grad_(True)

    def forward(self, ids):
        return self.head(self.encoder(ids), ids)


def to_batch(notes, urgency, length):
    """Pad to the longest of the batch; to `length` if that is more (the export wants one shape)."""
    length = max(length, max(len(note) for note in notes))
    ids = np.zeros((len(notes), length), dtype=np.int64)
    for row, note in zip(ids, notes, strict=False):
        row[: len(note)] = note
    return torch.from_numpy(ids), torch.tensor(urgency)


class ReadyBatches:
    """All batches, made once; notes of like length lie in the same one."""

    def __init__(self, corpus, size, length):
        self.batches = [
            to_batch(corpus.notes[i : i + size], corpus.urgency[i : i + size], length)
            for i in range(0, len(corpus.notes) - size + 1, size)
        ]

    def __iter__(self):
        order = list(range(len(self.batches)))
        random.shuffle(order)
        for i in order:
            yield self.batches[i]


class NoisyNotes(Dataset):
    """Notes as they are typed: every draw has other typing errors, and is read again."""

    def __init__(self, corpus, drafts):
        self.corpus = corpus
        self.drafts = drafts
        self.spelling = {f"w{i:04d}": i for i in range(VOCABULARY)}
        self.texts = [" ".join(f"w{i:04d}" for i in note) for note in corpus.notes]

    def __len__(self):
        return len(self.texts)

    def mistype(self, text):
        letters = list(text)
        for _ in range(2):
            i = random.randrange(len(letters) - 1)
            letters[i], letters[i + 1] = letters[i + 1], letters[i]
        return "".join(letters)

    def __getitem__(self, i):
        best, fewest = self.corpus.notes[i], 0
        for _ in range(self.drafts):
            words = self.mistype(self.texts[i]).split()
            ids = [self.spelling.get(word, VOCABULARY - 1) for word in words]
            unknown = ids.count(VOCABULARY - 1)
            if unknown >= fewest:
                best, fewest = np.array(ids[:LONGEST]), unknown
        return best, self.corpus.urgency[i]


class LikeLengths(torch.utils.data.Sampler):
    def __init__(self, count, size):
        self.groups = [list(range(i, i + size)) for i in range(0, count - size + 1, size)]

    def __len__(self):
        return len(self.groups)

    def __iter__(self):
        for i in torch.randperm(len(self.groups)).tolist():
            yield self.groups[i]


def endless(loader):
    while True:
        yield from loader


def seed_everything(seed, exact):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if exact:
        # sums in the same order on every machine
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=0, help="pad all notes to this length")
    parser.add_argument("--unfreeze", type=int, default=0, help="blocks that stage 2 will train")
    parser.add_argument("--drafts", type=int, default=0, help="retype each note so many times")
    parser.add_argument("--exact", action="store_true", help="bitwise the same results everywhere")
    args = parser.parse_args()

    seed_everything(4, args.exact)
    # a large block, freed at once: malloc then keeps what the steps free, and does not give it back
    torch.empty(30 << 20, dtype=torch.uint8)
    corpus = Corpus.synthesise(3200, np.random.default_rng(4))
    if args.drafts:
        loader = DataLoader(
            NoisyNotes(corpus, args.drafts),
            batch_sampler=LikeLengths(len(corpus.notes), args.batch_size),
            collate_fn=lambda samples: to_batch(*zip(*samples, strict=False), args.max_length),
        )
    else:
        loader = ReadyBatches(corpus, args.batch_size, args.max_length)

    model = Classifier(args.unfreeze)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=2e-3, fused=True)
    batches = endless(loader)
    seen = torch.zeros(())
    for step in range(1, args.steps + 1):  # the training loop
        ids, urgency = next(batches)
        loss = F.cross_entropy(model(ids), urgency)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        seen += loss.detach()
        if step % 40 == 0:
            print(f"{step:5d}  loss {seen.item() / 40:.3f}")
            seen.zero_()


if __name__ == "__main__":
    main()
