"""A GAN with a gradient penalty now and then; an averaged generator; two optimizers that take turns in one step."""  # noqa: E501

import argparse
import copy
import itertools
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import softplus


def mlp(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers[:-1])


def rings(count):
    angle = torch.rand(count, 8) * 6.2832
    radius = torch.randint(1, 4, (count, 1)) / 3 + torch.randn(count, 8) * 0.02
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)


class Forger:
    def __init__(self, cfg):
        self.cfg = cfg
        self.g, self.d = mlp(32, 256, 256, 16), mlp(16, 256, 256, 1)
        self.smooth = copy.deepcopy(self.g).requires_grad_(False)
        kind = {"lr": 2e-4, "betas": (0.0, 0.99), "fused": True}
        self.g_opt = torch.optim.Adam(self.g.parameters(), **kind)
        self.d_opt = torch.optim.Adam(self.d.parameters(), **kind)
        self.data = rings(20_000)
        self.live, self.mean = list(self.g.parameters()), list(self.smooth.parameters())

    def critic(self, step):
        real = self.data[torch.randint(len(self.data), (self.cfg.batch,))]
        with torch.no_grad():
            fake = self.g(torch.randn(self.cfg.batch, 32))
        loss = softplus(-self.d(real)).mean() + softplus(self.d(fake)).mean()
        if step % 16 == 0:
            part = real[:64].requires_grad_()
            (slope,) = torch.autograd.grad(self.d(part).sum(), part, create_graph=True)
            loss = loss + 16 * 0.1 * slope.square().sum(1).mean()
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.detach()

    def forge(self):
        self.d.requires_grad_(False)
        loss = softplus(-self.d(self.g(torch.randn(self.cfg.batch, 32)))).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        self.d.requires_grad_(True)
        torch._foreach_lerp_(self.mean, self.live, 0.01)
        return loss.detach()

    def fit(self):
        for step in range(self.cfg.steps):  # the training loop
            d_loss, g_loss = self.critic(step), self.forge()
            if step % 64 == 0:
                print("step", step, "critic", round(d_loss.item(), 3), "forger", round(g_loss.item(), 3))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    torch.manual_seed(77)
    Forger(SimpleNamespace(batch=512, steps=ap.parse_args().steps)).fit()
