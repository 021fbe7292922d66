"""Learns word vectors from made-up text by skip-grams; only the rows that a batch touches are updated."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, PAIRS, NEGATIVE = 60_000, 64, 3072, 6


def skip_grams(text, reach=2):
    for distance in range(1, reach + 1):
        yield torch.stack([text[:-distance], text[distance:]], dim=1)
        yield torch.stack([text[distance:], text[:-distance]], dim=1)


cli = argparse.ArgumentParser()
cli.add_argument("--steps", type=int, default=280)
args = cli.parse_args()

torch.manual_seed(41)
text = (torch.rand(50_000).pow(3) * WORDS).long()
pairs = torch.cat(list(skip_grams(text)))
pairs = pairs[torch.randperm(len(pairs))]
center, around = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Embedding(WORDS, WIDTH, sparse=True)
nn.init.uniform_(center.weight, -0.5 / WIDTH, 0.5 / WIDTH)
nn.init.zeros_(around.weight)
optimizer = torch.optim.SparseAdam([center.weight, around.weight], lr=2e-3)

for step in range(args.steps):  # the training loop
    begin = step * PAIRS % (len(pairs) - PAIRS)
    word, near = pairs[begin : begin + PAIRS].unbind(1)
    far = text[torch.randint(len(text), (PAIRS, NEGATIVE))]
    compared = around(torch.cat([near.unsqueeze(1), far], dim=1))
    scores = torch.bmm(compared, center(word).unsqueeze(2)).squeeze(2)
    loss = -(F.logsigmoid(scores[:, 0]) + F.logsigmoid(-scores[:, 1:]).sum(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
