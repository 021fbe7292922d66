"""Two networks that train each other, with an optimizer each."""

from itertools import pairwise

import torch
from torch import nn

BATCH, NOISE, SIZE = 128, 32, 256


def network(*sizes):
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


torch.manual_seed(0)
generator, critic = network(NOISE, 256, 256, SIZE), network(SIZE, 256, 256, 1)
generator_opt = torch.optim.Adam(generator.parameters(), lr=1e-4, fused=True)
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-4, fused=True)
real = torch.rand(16, BATCH, SIZE)
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
judge = nn.BCEWithLogitsLoss()
for step in range(150):  # the training loop
    fake = generator(torch.randn(BATCH, NOISE))
    critic_opt.zero_grad()
    (judge(critic(real[step % 16]), ones) + judge(critic(fake.detach()), zeros)).backward()
    critic_opt.step()
    generator_opt.zero_grad()
    judge(critic(fake), ones).backward()
    generator_opt.step()
