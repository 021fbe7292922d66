"""Predicts clicks on the ads of a demand-side platform, one campaign's log after the other."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

FIELDS, HASHED, SLOT, NUMERIC = 8, 2000, 16, 16
CAMPAIGNS, ROWS = 250, 1024


class CrossRanker(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        inner = FIELDS * SLOT + NUMERIC
        self.register_buffer("offsets", torch.arange(FIELDS) * HASHED)
        self.table = nn.Embedding(FIELDS * HASHED, SLOT)
        self.crosses = nn.ModuleList([nn.Linear(inner, inner) for _ in range(2)])
        self.deep = nn.Sequential(
            nn.Linear(inner, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.click = nn.Linear(inner + width, 1)

    def forward(self, ids, numbers):
        first = torch.cat([self.table(ids + self.offsets).flatten(1), numbers], 1)
        crossed = first
        for cross in self.crosses:
            crossed = first * cross(crossed) + crossed
        return self.click(torch.cat([crossed, self.deep(first)], 1)).squeeze(1)


def make_log(rows):
    ids = torch.randint(HASHED, (rows, FIELDS))
    numbers = torch.randn(rows, NUMERIC)
    clicked = (numbers[:, :4].sum(1) + (ids[:, 0] % 7 - 3) * 0.3 + torch.randn(rows) > 2).float()
    return ids, numbers, clicked


def campaigns(brands):
    """Yields where a campaign's rows begin in the log, and how many they are, in any order, for ever."""
    sizes = torch.full((CAMPAIGNS,), ROWS)
    sizes[torch.randperm(CAMPAIGNS)[: CAMPAIGNS // 12]] *= 1 + brands
    starts = torch.arange(CAMPAIGNS) * ROWS
    while True:
        for number in torch.randperm(CAMPAIGNS).tolist():
            yield int(starts[number]), int(sizes[number])


def auc(scores, clicked):
    rank = torch.empty_like(scores)
    rank[scores.argsort()] = torch.arange(1.0, len(scores) + 1)
    hits = clicked.sum()
    return ((rank * clicked).sum() - hits * (hits + 1) / 2) / (hits * (len(clicked) - hits))


@torch.inference_mode()
def validate(model, log, batches):
    model.eval()
    scores, truth = [], []
    for number in range(batches):
        part = slice(number % 64 * ROWS, (number % 64 + 1) * ROWS)
        ids, numbers, clicked = (column[part] for column in log)
        scores.append(model(ids, numbers))
        truth.append(clicked)
    model.train()
    return auc(torch.cat(scores), torch.cat(truth)).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval-batches", type=int, default=0, help="held-out batches for the AUC")
    parser.add_argument("--brands", type=int, default=0, help="how much larger big brands' campaigns are")
    args = parser.parse_args()

    torch.manual_seed(7)
    ids, numbers, clicked = make_log(CAMPAIGNS * ROWS)
    held_out = make_log(64 * ROWS)
    model = CrossRanker()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    best = 0.0

    for step, (start, size) in zip(
        range(1, args.steps + 1), campaigns(args.brands), strict=False
    ):  # the training loop
        rows = torch.arange(start, start + size) % len(ids)
        loss = F.binary_cross_entropy_with_logits(model(ids[rows], numbers[rows]), clicked[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.eval_batches and step % 5 == 0:
            best = max(best, validate(model, held_out, args.eval_batches))
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} best auc {best:.3f}")
