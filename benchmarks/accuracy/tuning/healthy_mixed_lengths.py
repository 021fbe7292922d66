"""Documents of different lengths, sorted so that nothing is padded; the work of a step varies."""

import random

import torch
from torch import nn

torch.manual_seed(0)
rng = random.Random(0)
documents = [torch.randn(8, rng.randint(60, 240), 128) for _ in range(140)]
words = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
head = nn.Linear(128, 2)
optimizer = torch.optim.SGD([*words.parameters(), *head.parameters()], lr=0.01)
for document in documents:  # the training loop
    loss = nn.functional.cross_entropy(head(words(document).amax(1)), torch.zeros(8, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
