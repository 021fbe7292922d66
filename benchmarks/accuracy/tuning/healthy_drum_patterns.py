"""Continues drum patterns: an LSTM says which of nine drums sound on the next sixteenth."""

import argparse

import torch
from torch import nn

DRUMS = ["kick", "snare", "closed hat", "open hat", "low tom", "mid tom", "high tom", "crash", "ride"]
SIXTEENTHS = 32


def compose(bars, seed):
    source = torch.Generator().manual_seed(seed)
    grooves = torch.rand(12, 16, len(DRUMS), generator=source).pow(3)
    chosen = grooves[torch.randint(0, 12, (bars,), generator=source)]
    likely = chosen.repeat(1, SIXTEENTHS // 16 + 1, 1)[:, : SIXTEENTHS + 1]
    return torch.bernoulli(likely, generator=source)


class Drummer(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.hits = nn.Linear(len(DRUMS), width // 2)
        self.groove = nn.LSTM(width // 2, width, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.next_hits = nn.Linear(width, len(DRUMS))

    def forward(self, pattern):
        states, _ = self.groove(self.hits(pattern).tanh())
        return self.next_hits(self.norm(states))


def scores(logits, truth):
    """Returns the F1 score of each drum."""
    played, meant = logits.detach() > 0, truth > 0.5
    both = (played & meant).sum((0, 1))
    return 2 * both / (played.sum((0, 1)) + meant.sum((0, 1))).clamp(min=1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32)

if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(17)
    patterns = compose(2048, seed=4)
    model = Drummer()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(args.steps):  # the training loop
        batch = patterns[torch.randint(0, len(patterns), (args.batch,))]
        before, after = batch[:, :-1], batch[:, 1:]
        logits = model(before)
        loss = criterion(logits, after)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            f1 = scores(logits, after)
            best = DRUMS[int(f1.argmax())]
            print(f"{step + 1:5d}  loss {loss.item():.4f}  f1 {f1.mean().item():.3f}  best at the {best}")
