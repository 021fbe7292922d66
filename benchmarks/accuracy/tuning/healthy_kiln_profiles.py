"""Predicts the temperature inside a kiln from the schedule of its burners, with spectral layers."""

import argparse
import math
from itertools import islice

import torch
from torch.nn import functional as F

MINUTES = 256
WIDTH = 64
MODES = 24
LAYERS = 3


def simulate(amount):
    """Schedules of the burners and the answers of three masses of brick, which are linear in them."""
    schedules = torch.rand(amount, 16).repeat_interleave(MINUTES // 16, 1)
    times = torch.arange(MINUTES)
    answer = sum(torch.exp(-times / slow) / slow for slow in (4.0, 18.0, 70.0))
    spectrum = torch.fft.rfft(schedules, 2 * MINUTES) * torch.fft.rfft(answer, 2 * MINUTES)
    return schedules, torch.fft.irfft(spectrum, 2 * MINUTES)[:, :MINUTES]


def mixtures(schedules, curves, size):
    """Batches without end; a sum of two schedules gives the sum of their curves."""
    while True:
        one, other = torch.randint(len(schedules), (2, size))
        share = torch.rand(size, 1)
        burners = share * schedules[one] + (1 - share) * schedules[other]
        yield burners, share * curves[one] + (1 - share) * curves[other]


def start():
    def weights(*shape, fan):
        return (torch.randn(*shape) / math.sqrt(fan)).requires_grad_()

    parameters = {"lift": weights(WIDTH, 2, 1, fan=2), "down": weights(1, WIDTH, 1, fan=WIDTH)}
    for layer in range(LAYERS):
        parameters[f"modes{layer}"] = weights(MODES, WIDTH, WIDTH, 2, fan=2 * WIDTH)
        parameters[f"point{layer}"] = weights(WIDTH, WIDTH, 1, fan=WIDTH)
        parameters[f"bias{layer}"] = torch.zeros(WIDTH, requires_grad=True)
    return parameters


def spectral(x, weight):
    low = torch.fft.rfft(x, norm="ortho")[:, :, :MODES].permute(2, 0, 1)
    mixed = torch.bmm(low, torch.view_as_complex(weight)).permute(1, 2, 0)
    return torch.fft.irfft(mixed, MINUTES, norm="ortho")


def predict(parameters, burners, clock):
    x = F.conv1d(torch.stack([burners, clock.expand_as(burners)], 1), parameters["lift"])
    for layer in range(LAYERS):
        straight = F.conv1d(x, parameters[f"point{layer}"], parameters[f"bias{layer}"])
        x = x + F.gelu(straight + spectral(x, parameters[f"modes{layer}"]))
    return F.conv1d(x, parameters["down"]).squeeze(1)


@torch.no_grad()
def worst_error(parameters, burners, curves, clock):
    return (predict(parameters, burners, clock) - curves).abs().max().item()


def train(steps):
    schedules, curves = simulate(1024)
    curves = (curves - curves.mean()) / curves.std()
    clock = torch.linspace(0, 1, MINUTES)
    parameters = start()
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-3, fused=True)
    feed = islice(mixtures(schedules[32:], curves[32:], 24), steps)
    for step, (burners, truth) in enumerate(feed, 1):  # the training loop
        loss = F.mse_loss(predict(parameters, burners, clock), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            worst = worst_error(parameters, schedules[:32], curves[:32], clock)
            print(f"{step:4} loss {loss.item():.4f} worst {worst:.3f}")
    return parameters


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(23)
    train(args.steps)


if __name__ == "__main__":
    main()
