"""Predicts properties and toxicities of small molecules with a message-passing network.

The molecules are collated once, before training; each epoch takes the batches in another order.
"""

import argparse
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ELEMENTS, BONDS, PROPERTIES, TOXICITIES = 12, 4, 3, 5


@dataclass(slots=True)
class Graphs:
    """Molecules of a batch, one after the other."""

    atoms: Tensor  # the element of each
    charges: Tensor
    source: Tensor  # of each bond, in both directions
    target: Tensor
    bonds: Tensor
    molecule: Tensor  # of each atom
    sizes: Tensor
    properties: Tensor
    toxic: Tensor
    measured: Tensor  # which of the toxicities are


def synthesise(rng: np.random.Generator, molecules: int, truth: np.ndarray) -> Graphs:
    sizes = rng.integers(10, 26, molecules)
    starts = np.cumsum(sizes) - sizes
    molecule = np.repeat(np.arange(molecules), sizes)
    atoms = rng.integers(0, ELEMENTS, len(molecule))

    chain = np.setdiff1d(np.arange(len(molecule)), starts)
    one, other = [np.repeat(starts, 3) + rng.integers(0, np.repeat(sizes, 3)) for _ in range(2)]
    rings = one != other
    source = np.concatenate([chain - 1, one[rings]])
    target = np.concatenate([chain, other[rings]])
    bonds = rng.integers(0, BONDS, len(source))
    source, target = np.concatenate([source, target]), np.concatenate([target, source])
    order = np.argsort(target, kind="stable")

    counts = np.zeros((molecules, ELEMENTS))
    np.add.at(counts, (molecule, atoms), 1)
    scores = (counts / sizes[:, None]) @ truth + rng.normal(0, 0.05, (molecules, PROPERTIES + TOXICITIES))
    return Graphs(
        atoms=torch.from_numpy(atoms),
        charges=torch.from_numpy(rng.normal(0, 0.3, (len(atoms), 1))).float(),
        source=torch.from_numpy(source[order]),
        target=torch.from_numpy(target[order]),
        bonds=torch.from_numpy(np.tile(bonds, 2)[order]),
        molecule=torch.from_numpy(molecule),
        sizes=torch.from_numpy(sizes).float()[:, None],
        properties=torch.from_numpy(scores[:, :PROPERTIES]).float(),
        toxic=torch.from_numpy(scores[:, PROPERTIES:] > 0).float(),
        measured=torch.from_numpy(rng.random((molecules, TOXICITIES)) < 0.7).float(),
    )


class Passing(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.message = nn.Linear(width, width)
        self.bond = nn.Embedding(BONDS, width)
        self.update = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        normed = self.norm(nodes)
        sent = self.message(normed).index_select(0, graphs.source)
        sent = F.relu(sent + self.bond(graphs.bonds))
        received = torch.zeros_like(nodes).index_add_(0, graphs.target, sent)
        return nodes + self.update(torch.cat([normed, received], 1))


class MoleculeNet(nn.Module):
    def __init__(self, width: int = 128, depth: int = 3):
        super().__init__()
        self.element, self.charge = nn.Embedding(ELEMENTS, width), nn.Linear(1, width)
        self.layers = nn.ModuleList([Passing(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.properties = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, PROPERTIES))
        self.toxicities = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, TOXICITIES))
        self.doubt = nn.Parameter(torch.zeros(2))

    def forward(self, graphs: Graphs) -> tuple[Tensor, Tensor]:
        nodes = self.element(graphs.atoms) + self.charge(graphs.charges)
        for layer in self.layers:
            nodes = layer(nodes, graphs)
        pooled = nodes.new_zeros(len(graphs.sizes), nodes.shape[1])
        pooled = self.norm(pooled.index_add_(0, graphs.molecule, nodes) / graphs.sizes)
        return self.properties(pooled), self.toxicities(pooled)

    def losses(self, graphs: Graphs) -> Tensor:
        """Of both tasks: the properties' and the toxicities'."""
        properties, logits = self(graphs)
        toxic = F.binary_cross_entropy_with_logits(logits, graphs.toxic, graphs.measured, reduction="sum")
        return torch.stack([F.huber_loss(properties, graphs.properties), toxic / graphs.measured.sum()])


class Trainer:
    def __init__(self, steps: int, batches: list[Graphs], held_out: list[Graphs]):
        self.steps, self.batches, self.held_out = steps, batches, held_out
        self.model = MoleculeNet()
        self.average = deepcopy(self.model).requires_grad_(False).eval()
        self.weights, self.averages = list(self.model.parameters()), list(self.average.parameters())
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3, weight_decay=1e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def shuffled(self):
        while True:
            for index in torch.randperm(len(self.batches)).tolist():
                yield self.batches[index]

    @torch.no_grad()
    def track(self, share: float = 0.2) -> None:
        torch._foreach_lerp_(self.averages, self.weights, share)

    @torch.inference_mode()
    def evaluate(self) -> list[float]:
        losses = [self.average.losses(graphs) for graphs in self.held_out]
        return torch.stack(losses).mean(0).tolist()

    def fit(self) -> None:
        for step, graphs in enumerate(islice(self.shuffled(), self.steps), 1):  # the training loop
            losses = self.model.losses(graphs)
            loss = (losses * torch.exp(-self.model.doubt) + self.model.doubt).sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            if step % 10 == 0:
                self.track()
            if step % 100 == 0:
                properties, toxicities = self.evaluate()
                print(f"{step:5d} loss {loss.item():.3f} held out {properties:.4f} {toxicities:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--molecules", type=int, default=48, help="in a batch")
    args = parser.parse_args()
    torch.manual_seed(23)
    rng = np.random.default_rng(23)
    truth = rng.normal(0, 2, (ELEMENTS, PROPERTIES + TOXICITIES))
    batches = [synthesise(rng, args.molecules, truth) for _ in range(42)]
    Trainer(args.steps, batches[:40], batches[40:]).fit()


if __name__ == "__main__":
    main()
