"""Goes on with a psalm, letter by letter: an LSTM on streams of one long text (truncated backpropagation)."""

import argparse

import numpy as np
import torch
from torch import nn

LETTERS = 40

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--streams", type=int, default=32)
parser.add_argument("--span", type=int, default=40)
parser.add_argument("--hidden", type=int, default=192)
args = parser.parse_args()

# a text of words that come again and again
rng = np.random.default_rng(19)
words = [np.append(rng.integers(1, LETTERS, rng.integers(2, 9)), 0) for _ in range(300)]
choice = np.minimum(rng.geometric(0.02, 80_000), 300) - 1
text = np.concatenate([words[which] for which in choice])
length = (len(text) - 1) // args.streams // args.span * args.span
text = text[: args.streams * length + 1]
given = torch.from_numpy(text[:-1].reshape(args.streams, length).T.copy())  # time first
wanted = torch.from_numpy(text[1:].reshape(args.streams, length).T.copy())

torch.manual_seed(19)
embed = nn.Embedding(LETTERS, args.hidden)
lstm = nn.LSTM(args.hidden, args.hidden)
out = nn.Linear(args.hidden, LETTERS)
parameters = [*embed.parameters(), *lstm.parameters(), *out.parameters()]
optimizer = torch.optim.Adam(parameters, lr=2e-3, fused=True)
criterion = nn.CrossEntropyLoss()

place, state = 0, None
for step in range(args.steps):  # the training loop
    if place == length:
        place, state = 0, None
    span = slice(place, place + args.span)
    place += args.span
    hidden, state = lstm(embed(given[span]), state)
    state = tuple(part.detach() for part in state)
    loss = criterion(out(hidden).flatten(0, 1), wanted[span].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    if step % 100 == 99:
        print(f"{step + 1}: {loss.item():.3f} nats a letter")
