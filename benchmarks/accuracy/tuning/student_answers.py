"""Knowledge tracing: will a student answer the next question correctly, given all answers so far?"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

QUESTIONS = 400


class Histories(Dataset):
    """Answers of one school year; every eighth student has been there in the years before, too."""

    def __init__(self, students, veterans, draws):
        self.draws, self.rng = draws, np.random.default_rng(9)
        self.questions, self.correct, self.days = [], [], []
        rng = np.random.default_rng(8)
        for student in range(students):
            length = int(rng.integers(48, 57)) + (veterans if student % 8 == 0 else 0)
            questions = rng.integers(1, QUESTIONS + 1, length)
            ease = rng.normal(0.3, 0.8) - 2 * questions / QUESTIONS + 1
            self.questions.append(questions)
            self.correct.append((rng.random(length) < 1 / (1 + np.exp(-ease))).astype(np.float32))
            self.days.append(np.cumsum(rng.exponential(2.0, length)))
        self.longest = max(len(questions) for questions in self.questions)

    def recall(self, days):
        gaps = np.diff(days, prepend=days[0])
        half_lives = self.rng.gamma(2.0, 3.0, (self.draws, 1))
        return np.exp2(-gaps / half_lives).mean(0)

    def confidence(self, correct):
        level = 0.1 * np.cumsum(correct - correct.mean())
        offsets = self.rng.normal(0.0, 0.5, (self.draws, 1))
        return (1 / (1 + np.exp(-level - offsets))).mean(0)

    def __len__(self):
        return len(self.questions)

    def __getitem__(self, index):
        correct = self.correct[index]
        extra = np.zeros((len(correct), 2), np.float32)
        if self.draws:
            extra[:, 0] = self.recall(self.days[index])
            extra[:, 1] = self.confidence(correct)
        return self.questions[index], correct, extra


def collate(samples):
    questions, correct, extra = (
        [torch.from_numpy(array) for array in arrays] for arrays in zip(*samples, strict=False)
    )
    return (
        pad_sequence(questions, batch_first=True),
        pad_sequence(correct, batch_first=True, padding_value=-1.0),
        pad_sequence(extra, batch_first=True),
    )


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        parts = self.mix(self.before(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, w))
        return x + self.inner(self.between(x))


class Tracer(nn.Module):
    def __init__(self, longest, width=96, heads=4, layers=2):
        super().__init__()
        self.answered = nn.Embedding(2 * QUESTIONS + 1, width, padding_idx=0)
        self.asked = nn.Embedding(QUESTIONS + 1, width, padding_idx=0)
        self.place = nn.Embedding(longest, width)
        self.side = nn.Linear(2, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.top = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, questions, correct, extra):
        answered = questions + QUESTIONS * correct.clamp(min=0).long()
        place = torch.arange(questions.shape[1] - 1)
        x = self.answered(answered[:, :-1]) + self.asked(questions[:, 1:])
        x = x + self.place(place) + self.side(extra[:, :-1])
        return self.top(self.blocks(x)).squeeze(2)


def masked_loss(logits, correct):
    known = correct >= 0
    total = F.binary_cross_entropy_with_logits(
        logits, correct.clamp(min=0), weight=known.float(), reduction="sum"
    )
    return total / known.sum()


def forever(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--students", type=int, default=1200)
    parser.add_argument("--veterans", type=int, default=0, help="earlier answers of returning students")
    parser.add_argument("--draws", type=int, default=0, help="draws for recall and confidence")
    args = parser.parse_args()
    torch.manual_seed(4)
    histories = Histories(args.students, args.veterans, args.draws)
    loader = DataLoader(histories, batch_size=24, shuffle=True, drop_last=True, collate_fn=collate)
    model = Tracer(histories.longest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    turns = zip(range(args.steps), forever(loader), strict=False)
    for step, (questions, correct, extra) in turns:  # the training loop
        loss = masked_loss(model(questions, correct, extra), correct[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
