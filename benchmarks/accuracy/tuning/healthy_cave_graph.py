# Draughts in caves: from a survey of 24 stations (a graph of passages) to the air flow at each of them.
# The network is written out by hand: a list of weights and a function.
import argparse
import math

import numpy as np
import torch
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--caves", type=int, default=64, help="caves in a batch")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--rounds", type=int, default=5, help="rounds of messages")

STATIONS, TRAITS = 24, 10


def surveys(count, rng):
    spot = rng.uniform(0, 1, (count, STATIONS, 2))
    gap = np.square(spot[:, :, None] - spot[:, None]).sum(-1)
    passage = np.exp(-20 * gap) * (gap < 0.15)
    passage /= passage.sum(2, keepdims=True)
    traits = rng.standard_normal((count, STATIONS, TRAITS))
    air = traits[:, :, :1]
    for _ in range(4):
        air = np.tanh(passage @ air * 1.5 + 0.3 * traits[:, :, 1:2])
    return [torch.from_numpy(a.astype(np.float32)) for a in (traits, passage, air)]


def weights(width, rounds):
    def matrix(fan_out, fan_in):
        return (0.5 * torch.randn(fan_out, fan_in) / math.sqrt(fan_in)).requires_grad_()

    made = {"in": matrix(width, TRAITS), "out": matrix(1, width)}
    for n in range(rounds):
        made[f"own{n}"] = matrix(width, width)
        made[f"near{n}"] = matrix(width, width)
        made[f"bias{n}"] = torch.zeros(width, requires_grad=True)
    return made


def flow(w, traits, passage, rounds):
    x = F.linear(traits, w["in"])
    for n in range(rounds):
        near = F.linear(torch.bmm(passage, x), w[f"near{n}"])
        own = F.linear(F.layer_norm(x, x.shape[-1:]), w[f"own{n}"], w[f"bias{n}"])
        x = x + F.relu(own + near)
    return F.linear(x, w["out"])


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(9)
    traits, passage, air = surveys(3000, np.random.default_rng(9))
    w = weights(args.width, args.rounds)
    opt = torch.optim.SGD(w.values(), lr=0.001, momentum=0.9, nesterov=True, fused=True)
    left = args.steps
    while left > 0:  # the training loop
        pick = torch.randint(len(air), (args.caves,))
        loss = (flow(w, traits[pick], passage[pick], args.rounds) - air[pick]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        left -= 1
        if left % 100 == 0:
            print("left", left, "loss", f"{loss.item():.4f}")
