"""Labels the rock along boreholes from their logs, with an LSTM that is carried from window to window."""

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Setup:
    steps: int
    wells: int = 64
    window: int = 48
    windows: int = 50
    logs: int = 6
    facies: int = 5
    hidden: int = 96


def drill(setup):
    """Beds of rock, some ten samples thick, and what the tools read in them."""
    depth = setup.window * setup.windows
    beds = torch.randint(setup.facies, (setup.wells, depth // 10 + 1))
    rock = beds.repeat_interleave(10, dim=1)[:, :depth]
    reading = torch.randn(setup.facies, setup.logs)[rock]
    return reading + 0.7 * torch.randn_like(reading), rock


def windows(logs, rock, length):
    while True:
        for number, (x, y) in enumerate(
            zip(logs.split(length, dim=1), rock.split(length, dim=1), strict=False)
        ):
            yield number == 0, x, y


class RockLabeller(nn.Module):
    def __init__(self, setup):
        super().__init__()
        self.inner = nn.LSTM(setup.logs, setup.hidden, num_layers=2, batch_first=True)
        self.label = nn.Linear(setup.hidden, setup.facies)

    def forward(self, logs, state):
        hidden, state = self.inner(logs, state)
        return self.label(hidden), tuple(part.detach() for part in state)


def fit(setup):
    torch.manual_seed(31)
    feed = windows(*drill(setup), setup.window)
    model = RockLabeller(setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    state = None
    for step, (top, logs, rock) in enumerate(feed, 1):  # the training loop
        scores, state = model(logs, None if top else state)
        loss = F.cross_entropy(scores.flatten(0, 1), rock.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")
        if step >= setup.steps:
            break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    fit(Setup(steps=parser.parse_args().steps))
