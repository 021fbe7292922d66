"""Sorts patents by text and citations: a graph layer's fixed point, differentiated implicitly."""

import argparse

import torch
from torch import nn


def citation_graph(amount, sections, words):
    """Bags of words, normalised citations in both directions, and each patent's section."""
    section = torch.randint(sections, (amount,))
    same = section[:, None] == section[None, :]
    cites = torch.rand(amount, amount) < torch.where(same, 0.03, 0.003)
    links = (cites | cites.T).float().fill_diagonal_(1)
    scale = links.sum(1).rsqrt()
    topics = torch.rand(sections, words) * 0.08
    bags = torch.bernoulli((topics[section] + 0.02).clamp(max=1))
    return bags, links * scale[:, None] * scale[None, :], section


def iterate(function, state, rounds):
    for _ in range(rounds):
        state = function(state)
    return state


class Equilibrium(nn.Module):
    def __init__(self, graph, words, width, sections, rounds=6, contraction=0.9):
        super().__init__()
        self.register_buffer("graph", graph)
        self.register_buffer("state", torch.zeros(len(graph), width))
        self.encode = nn.Sequential(nn.Dropout(0.2), nn.Linear(words, width))
        self.mix = nn.Parameter(torch.randn(width, width) / width)
        self.read = nn.Linear(width, sections)
        self.rounds, self.contraction = rounds, contraction

    def layer(self, state, given, mix):
        return torch.tanh(self.graph @ (state @ mix) + given)

    def forward(self, bags):
        given = self.encode(bags)
        norm = torch.linalg.matrix_norm(self.mix).clamp(min=self.contraction)
        mix = self.mix * (self.contraction / norm)
        with torch.no_grad():
            found = iterate(lambda state: self.layer(state, given, mix), self.state, self.rounds)
            self.state.copy_(found)
        fixed = self.layer(found, given, mix)
        if fixed.requires_grad:
            start = found.detach().requires_grad_()
            once = self.layer(start, given, mix)

            def solve_adjoint(grad):
                def pull_back(adjoint):
                    return torch.autograd.grad(once, start, adjoint, retain_graph=True)[0] + grad

                return iterate(pull_back, grad, self.rounds)

            fixed.register_hook(solve_adjoint)
        return self.read(fixed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(29)
    bags, graph, section = citation_graph(amount=1000, sections=8, words=320)
    order = torch.randperm(len(bags))
    known, held = order[:300], order[300:]
    model = Equilibrium(graph, words=320, width=64, sections=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2, fused=True)

    for step in range(1, steps + 1):  # the training loop
        loss = nn.functional.cross_entropy(model(bags)[known], section[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            model.eval()
            with torch.no_grad():
                right = (model(bags)[held].argmax(1) == section[held]).float().mean().item()
            model.train()
            print(f"step {step} loss {loss.item():.4f} held-out accuracy {right:.3f}")
