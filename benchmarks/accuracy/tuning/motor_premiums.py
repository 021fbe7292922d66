"""Pure premiums of motor policies: a residual network with a Poisson loss on indexed claims."""

import argparse
import socket
import threading
import time

import torch
from torch import nn
from torch.nn import functional as F

POLICIES, NUMERIC, FACTORS, LEVELS = 512 * 60, 40, 6, 50


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.silu(self.inner(self.norm(x)))


class TariffNet(nn.Module):
    def __init__(self, width=448):
        super().__init__()
        self.levels = nn.Embedding(FACTORS * LEVELS, 8)
        self.register_buffer("offsets", torch.arange(FACTORS) * LEVELS)
        self.enter = nn.Linear(NUMERIC + FACTORS * 8, width)
        self.hidden = nn.Sequential(Residual(width), Residual(width))
        self.leave = nn.Linear(width, 1)

    def forward(self, numeric, factors):
        levels = self.levels(factors + self.offsets).flatten(1)
        return self.leave(self.hidden(self.enter(torch.cat([numeric, levels], 1)))).squeeze(1)


def serve(server, latency):
    line, _ = server.accept()
    with server, line:
        while request := line.recv(256):
            time.sleep(latency / 1000)
            line.sendall(b"%.6f" % (1 + 0.0001 * int(request.split()[1])))


class ClaimsIndex:
    """The actuaries' inflation index, from a stand-in of their service."""

    def __init__(self, latency):
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=serve, args=(server, latency), daemon=True).start()
        self.line = socket.create_connection(server.getsockname())

    def at(self, step):
        self.line.sendall(b"motor %d\n" % step)
        return float(self.line.recv(64))


class Balance:
    """Leans on rating cells whose premiums have drifted away from their claims."""

    def __init__(self, cells):
        self.lean = [0.0] * cells
        self.drift = [0.0] * cells

    def weights(self, cells):
        return torch.tensor([1 + self.lean[cell] for cell in cells])

    def update(self, cells, gaps):
        for cell, gap in zip(cells, gaps, strict=False):
            self.drift[cell] += gap
        for cell in range(len(self.lean)):
            moved = 0.99 * self.lean[cell] + 0.01 * self.drift[cell]
            self.lean[cell] = min(max(moved, -0.2), 0.2)
            self.drift[cell] *= 0.9


def shuffled(amount, size):
    while True:
        yield from torch.randperm(amount).split(size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--latency", type=float, default=0, help="ms that the index service takes")
    parser.add_argument("--cells", type=int, default=0, help="rating cells to keep in balance")
    args = parser.parse_args()

    torch.manual_seed(12)
    numeric = torch.randn(POLICIES, NUMERIC)
    factors = torch.randint(0, LEVELS, (POLICIES, FACTORS))
    exposure = 0.2 + 0.8 * torch.rand(POLICIES)
    cells = torch.randint(0, max(args.cells, 1), (POLICIES,))
    claims = torch.poisson(exposure * torch.exp(0.3 * numeric[:, 0] - 0.5 * numeric[:, 1].square() - 0.5))

    model = TariffNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    index = ClaimsIndex(args.latency) if args.latency else None
    balance = Balance(args.cells) if args.cells else None
    draws = shuffled(POLICIES, 512)

    for step in range(args.steps):  # the training loop
        rows = next(draws)
        target = claims[rows]
        if index:
            target = target * index.at(step)
        logs = model(numeric[rows], factors[rows]) + exposure[rows].log()
        losses = F.poisson_nll_loss(logs, target, reduction="none")
        if balance:
            members = cells[rows].tolist()
            losses = losses * balance.weights(members)
        loss = losses.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if balance:
            balance.update(members, (target - logs.detach().exp()).tolist())
        if step % 50 == 49:
            print(f"{step + 1} of {args.steps}: deviance {loss.item():.4f}")
