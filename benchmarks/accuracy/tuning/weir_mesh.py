"""One-step simulator of shallow water between weirs, on a triangulated bed.

Encode, process, decode (Sanchez-Gonzalez et al. 2020, Pfaff et al. 2021). Each node also gets a description
from a prior that was pretrained on steady flows; the simulator is trained on top of it.
"""

import argparse
import csv
import math
import tempfile
from collections import namedtuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ROWS, COLS = 22, 26
NODES = ROWS * COLS
WIDTH, ROUNDS = 40, 6
PRIOR_WIDTH, PRIOR_LAYERS = 112, 24
RUNS, FRAMES, HELD_OUT, CHECK_EVERY = 12, 40, 2, 20

Mesh = namedtuple("Mesh", "sender receiver offsets")
Flows = namedtuple("Flows", "states bed change")  # states: run, frame, node, (depth, two velocities)


def triangulate(dice):
    """Grid points, moved a little, with edges along rows, columns and one diagonal, both ways."""
    number = np.arange(NODES).reshape(ROWS, COLS)
    one = [part.ravel() for part in (number[:, :-1], number[:-1], number[:-1, :-1])]
    other = [part.ravel() for part in (number[:, 1:], number[1:], number[1:, 1:])]
    sender, receiver = np.concatenate(one + other), np.concatenate(other + one)
    place = np.stack(np.divmod(number.ravel(), COLS), 1) + dice.uniform(-0.2, 0.2, (NODES, 2))
    offset = place[receiver] - place[sender]
    return sender, receiver, np.concatenate([offset, np.linalg.norm(offset, axis=1, keepdims=True)], 1)


def smooth(field, times):
    for _ in range(times):
        sides = sum(np.roll(field, shift, axis) for shift in (-1, 1) for axis in (-2, -1))
        field = 0.5 * field + 0.125 * sides
    return field


def run_solver(dice):
    bed = smooth(dice.normal(size=(RUNS, ROWS, COLS)), 3)
    depth = 2 + smooth(dice.normal(size=(RUNS, ROWS, COLS)), 4) - bed
    flow = np.zeros((2, RUNS, ROWS, COLS))
    states = []
    for _ in range(FRAMES):
        flow = 0.98 * flow - 0.1 * np.stack(np.gradient(depth + bed, axis=(1, 2)))
        depth = depth - 0.1 * (np.gradient(flow[0], axis=1) + np.gradient(flow[1], axis=2))
        states.append(np.stack([depth, *flow], -1).reshape(RUNS, NODES, 3))
    return np.stack(states, 1), bed.reshape(RUNS, NODES, 1)


def load(dice, as_simulated):
    sender, receiver, offsets = map(torch.from_numpy, triangulate(dice))
    states, bed = map(torch.from_numpy, run_solver(dice))
    if not as_simulated:
        states, bed, offsets = states.float(), bed.float(), offsets.float()
    states = (states - states.mean((0, 1, 2))) / states.std((0, 1, 2))
    change = (states[:, 1:] - states[:, :-1]).std((0, 1, 2))
    return Mesh(sender, receiver, offsets), Flows(states, bed, change)


def perceptron(inputs, outputs, *norm):
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outputs), *norm)


class Round(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = perceptron(3 * WIDTH, WIDTH, nn.LayerNorm(WIDTH))
        self.update = perceptron(2 * WIDTH, WIDTH, nn.LayerNorm(WIDTH))

    def forward(self, nodes, edges, mesh):
        ends = nodes.index_select(0, mesh.sender), nodes.index_select(0, mesh.receiver)
        edges = edges + self.message(torch.cat([edges, *ends], 1))
        heard = torch.zeros_like(nodes).index_add(0, mesh.receiver, edges)
        return nodes + self.update(torch.cat([nodes, heard], 1)), edges


class Simulator(nn.Module):
    def __init__(self):
        super().__init__()
        self.node_in = perceptron(4 + PRIOR_WIDTH, WIDTH, nn.LayerNorm(WIDTH))
        self.edge_in = perceptron(3, WIDTH, nn.LayerNorm(WIDTH))
        self.rounds = nn.ModuleList(Round() for _ in range(ROUNDS))
        self.out = perceptron(WIDTH, 3)

    def forward(self, state, description, mesh):
        nodes, edges = self.node_in(torch.cat([state, description], 1)), self.edge_in(mesh.offsets)
        for one_round in self.rounds:
            nodes, edges = one_round(nodes, edges, mesh)
        return self.out(nodes)


class Prior(nn.Module):
    """Came with the paper's weights. `tunable` counts the last layers, for when it is to be fine-tuned."""

    def __init__(self, tunable):
        super().__init__()
        self.lift = nn.Linear(4, PRIOR_WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(PRIOR_WIDTH), nn.Linear(PRIOR_WIDTH, PRIOR_WIDTH), nn.SiLU())
            for _ in range(PRIOR_LAYERS)
        )
        self.requires_grad_(False)
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number >= PRIOR_LAYERS - tunable)

    def forward(self, x):
        x = self.lift(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class AggMo(torch.optim.Optimizer):
    def __init__(self, params, lr, velocities):
        super().__init__(params, {"lr": lr, "betas": np.linspace(0, 0.95, velocities).tolist()})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            betas = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if "velocities" not in state:
                    state["velocities"] = [torch.zeros_like(weight) for _ in betas]
                for beta, velocity in zip(betas, state["velocities"], strict=True):
                    velocity.mul_(beta).add_(weight.grad)
                    weight.sub_(velocity, alpha=group["lr"] / len(betas))


class RatesOfRun:
    def __init__(self, table, rows):
        self.table = table
        with open(table, "w") as file:
            print("update,scale", file=file)
            for row in range(rows):
                print(f"{row},{0.5 + 0.5 * math.cos(3 * row / rows):.6f}", file=file)

    def __call__(self, update):
        with open(self.table, newline="") as file:
            scales = {int(line["update"]): float(line["scale"]) for line in csv.DictReader(file)}
        return scales[min(update, len(scales) - 1)]


def balance(surplus, reaches):
    """Water and momentum that come from nowhere, reach by reach."""
    of_node = torch.arange(NODES) * reaches // NODES
    found = []
    for reach in range(reaches):
        depth, *flow = surplus[of_node == reach].sum(0)
        found.append(depth.abs() + 0.1 * torch.stack(flow).norm())
    return torch.stack(found).mean()


def window(flows, run, frame, noise=0.0):
    state = flows.states[run, frame]
    if noise:
        state = state + noise * torch.randn_like(state)
    target = (flows.states[run, frame + 1] - state) / flows.change
    return torch.cat([state, flows.bed[run]], 1), target


@torch.no_grad()
def held_out_error(simulator, prior, mesh, flows, count):
    total = 0.0
    for number in range(count):
        seen, target = window(flows, RUNS - 1 - number % HELD_OUT, number // HELD_OUT % (FRAMES - 1))
        total += F.mse_loss(simulator(seen, prior(seen), mesh), target).item()
    return total / count


def train(options, folder):
    torch.manual_seed(11)
    dice = np.random.default_rng(11)
    mesh, flows = load(dice, options.as_simulated)
    simulator = Simulator().to(flows.states.dtype)
    prior = Prior(options.tunable).to(flows.states.dtype)
    if options.velocities:
        optimizer = AggMo(simulator.parameters(), lr=1e-4, velocities=options.velocities)
    else:
        optimizer = torch.optim.AdamW(simulator.parameters(), lr=1e-3, fused=True)
    rates = RatesOfRun(f"{folder}/rates.csv", options.rates) if options.rates else lambda _: 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    losses, best = [], math.inf
    for step in range(1, options.steps + 1):  # the training loop
        run, frame = int(dice.integers(RUNS - HELD_OUT)), int(dice.integers(FRAMES - 1))
        seen, target = window(flows, run, frame, noise=0.02)
        predicted = simulator(seen, prior(seen), mesh)
        loss = F.mse_loss(predicted, target)
        losses.append(loss.detach())
        if options.reaches:
            loss = loss + 1e-4 * balance(predicted - target, options.reaches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if options.windows and step % CHECK_EVERY == 0:
            best = min(best, held_out_error(simulator, prior, mesh, flows, options.windows))
    print(f"loss {torch.stack(losses[-20:]).mean():.4f}, held out {best:.4f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=231)
    cli.add_argument("--tunable", type=int, default=0, help="last layers of the prior that are not fixed")
    cli.add_argument("--as-simulated", action="store_true", help="take the solver's numbers as they are")
    cli.add_argument("--reaches", type=int, default=0, help="reaches whose water has to balance")
    cli.add_argument("--velocities", type=int, default=0, help="velocities of aggregated momentum")
    cli.add_argument("--rates", type=int, default=0, help="updates of the run whose rates are followed")
    cli.add_argument("--windows", type=int, default=0, help="held-out windows to find the best weights by")
    with tempfile.TemporaryDirectory() as scratch:
        train(cli.parse_args(), scratch)
