"""Translates dates into another notation: one GRU reads, another writes under teacher forcing."""

import torch
import torch.nn.functional as F
from torch import nn

SYMBOLS, READ, WRITTEN, BATCH = 40, 24, 11, 48
START = 0


class Translator(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.read_symbols, self.write_symbols = nn.Embedding(SYMBOLS, 64), nn.Embedding(SYMBOLS, 64)
        self.reader = nn.GRU(64, width, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * width, width)
        self.writer = nn.GRU(64, width, batch_first=True)
        self.symbol = nn.Linear(2 * width, SYMBOLS)

    def forward(self, source, before):
        memory = self.bridge(self.reader(self.read_symbols(source))[0])
        states, _ = self.writer(self.write_symbols(before), memory[:, -1].unsqueeze(0).contiguous())
        context = F.scaled_dot_product_attention(states, memory, memory)
        return self.symbol(torch.cat([states, context], dim=2))


def make_dates(count):
    source = torch.randint(1, SYMBOLS, (count, READ))
    return source, source[:, 2 : 2 + WRITTEN].flip(1)


def fit(steps):
    torch.manual_seed(31)
    sources, targets = make_dates(4800)
    translator = Translator()
    optimizer = torch.optim.Adam(translator.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    start = torch.full((BATCH, 1), START)
    for step in range(steps):  # the training loop
        rows = slice(step % 100 * BATCH, (step % 100 + 1) * BATCH)
        source, target = sources[rows], targets[rows]
        scores = translator(source, torch.cat([start, target[:, :-1]], dim=1))
        loss = F.cross_entropy(scores.transpose(1, 2), target)
        loss.backward()
        nn.utils.clip_grad_norm_(translator.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    import argparse

    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=280)
    fit(cli.parse_args().steps)
