"""Learns weights from which the curve of a new flow meter is two gradient steps away (MAML, Meta-SGD).

All meters of a batch adapt side by side: each has its own copy of the weights, as one more dimension of
them. How far a step goes is learned, too, for each tensor. As in MAML++, the first third of the run takes
the slopes of the inner steps for constants; after that gradients flow through them.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

METERS, READINGS, INPUTS = 1500, 128, 8
TASKS, WIDTH, INNER_STEPS = 16, 160, 2


class MeterWise(nn.Module):
    """A linear layer whose weights may differ from meter to meter."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(1, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


def curve() -> nn.Module:
    return nn.Sequential(
        MeterWise(INPUTS, WIDTH), nn.Tanh(), MeterWise(WIDTH, WIDTH), nn.Tanh(), MeterWise(WIDTH, 1)
    )


def calibration_bench() -> tuple[Tensor, Tensor]:
    """What the meters showed for what flowed: a family of curves with three unknowns per meter."""
    conditions = torch.randn(METERS, READINGS, INPUTS)
    gain, bend, phase = torch.rand(3, METERS, 1, 1).unbind()
    drive = conditions @ (torch.randn(INPUTS, 1) / math.sqrt(INPUTS))
    shown = (0.5 + gain) * drive + bend * torch.sin(2 * drive + 6 * phase)
    return conditions, shown + 0.02 * torch.randn_like(shown)


def batches(conditions: Tensor, shown: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The first half of a meter's readings is to adapt to, the second to be judged by."""
    while True:
        for meters in torch.randperm(METERS)[: METERS // TASKS * TASKS].split(TASKS):
            x, y = conditions.index_select(0, meters), shown.index_select(0, meters)
            yield *x.chunk(2, dim=1), *y.chunk(2, dim=1)


class MetaLearner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.curve = curve()
        self.log_rates = nn.Parameter(torch.full((len(list(self.curve.parameters())),), math.log(0.05)))

    def errors(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(self.curve, weights, (x,)) - y).square().mean((1, 2))

    def adapt(self, x: Tensor, y: Tensor, through: bool) -> dict[str, Tensor]:
        weights = {name: w.expand(len(x), -1, -1) for name, w in self.curve.named_parameters()}
        rates = self.log_rates.exp().unbind()
        for _ in range(INNER_STEPS):
            total = self.errors(weights, x, y).sum()
            slopes = torch.autograd.grad(total, list(weights.values()), create_graph=through)
            weights = {
                name: w - rate * slope
                for (name, w), rate, slope in zip(weights.items(), rates, slopes, strict=True)
            }
        return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    steps = parser.parse_args().steps
    torch.manual_seed(17)
    learner = MetaLearner()
    optimizer = torch.optim.Adam(
        [{"params": learner.curve.parameters()}, {"params": [learner.log_rates], "lr": 1e-2}],
        lr=1e-3,
        fused=True,
    )
    stream = batches(*calibration_bench())
    history = torch.zeros(steps)
    for step in range(steps):  # the training loop
        x, new_x, y, new_y = next(stream)
        weights = learner.adapt(x, y, through=step >= steps // 3)
        error = learner.errors(weights, new_x, new_y).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        history[step] = error.detach()
    print(f"error {history[:20].mean():.4f}, in the end {history[-20:].mean():.4f}")


if __name__ == "__main__":
    main()
