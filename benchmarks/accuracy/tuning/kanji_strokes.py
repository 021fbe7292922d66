"""Which character was written? Strokes, as they come from the pen, through a narrow and deep encoder."""

import argparse
import logging
import math

import torch
from torch import Tensor, nn

log = logging.getLogger("kanji")
CHARACTERS, STROKES, PEN = 120, 24, 6


class Layer(nn.Module):
    """Strokes look at each other through a gate, as in a gated MLP."""

    def __init__(self, width: int, told: bool):
        super().__init__()
        self.told = told
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.between = nn.Parameter(torch.eye(STROKES) + 0.02 * torch.randn(STROKES, STROKES))
        self.shift = nn.Parameter(torch.zeros(STROKES, 1))
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        if self.told:
            log.debug("comes in: %s", tuple(normal.shape))
        a, b = self.up(normal).chunk(2, -1)
        if self.told:
            log.debug("gate: %s", tuple(a.shape))
        b = self.between @ b + self.shift
        if self.told:
            log.debug("between the strokes: %s", tuple(b.shape))
        b = torch.sigmoid(a) * b
        if self.told:
            log.debug("goes out: %s", tuple(b.shape))
        return x + self.down(b)


class Reader(nn.Module):
    def __init__(self, width: int, depth: int, told: int):
        super().__init__()
        self.enter = nn.Linear(PEN, width)
        self.layers = nn.ModuleList(Layer(width, n < told) for n in range(depth))
        self.leave = nn.Linear(width, CHARACTERS)

    def forward(self, strokes: Tensor) -> Tensor:
        x = self.enter(strokes)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x.mean(1))


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of an interpolated momentum (Chen et al., 2023), as far as a weight is large."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (b1, b2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
                m = self.state[p]["m"]
                update = m.mul(b1).add_(p.grad, alpha=1 - b1).sign_().add_(p, alpha=group["decay"])
                trust = p.norm().clamp_(0.1, 10.0) / update.norm().clamp_min_(1e-6)
                p.sub_(update.mul_(trust).mul_(lr))
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def writing(people: int) -> tuple[Tensor, Tensor]:
    pen = torch.Generator().manual_seed(77)
    models = torch.randn(CHARACTERS, STROKES, PEN, generator=pen)
    character = torch.randint(CHARACTERS, (people,), generator=pen)
    return models[character] + 0.4 * torch.randn(people, STROKES, PEN, generator=pen), character


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--tell", type=int, default=0, help="layers that note what comes in, for debugging")
    parser.add_argument("--sign", action="store_true", help="train with sign momentum in place of AdamW")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(1)
    strokes, character = writing(8192)
    reader = Reader(args.width, args.depth, args.tell)
    read = torch.compile(reader, backend=args.backend) if args.compile else reader
    if args.sign:
        optimizer = SignMomentum(reader.parameters())
    else:
        optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-3, fused=True)
    start = 0
    order = torch.randperm(len(strokes))
    for step in range(args.steps):  # the training loop
        if start + args.batch > len(order):
            order, start = torch.randperm(len(strokes)), 0
        rows = order[start : start + args.batch]
        start += args.batch
        loss = nn.functional.cross_entropy(read(strokes[rows]), character[rows], label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            log.info("step %d: loss %.3f of %.3f", step + 1, loss.item(), math.log(CHARACTERS))


if __name__ == "__main__":
    main()
