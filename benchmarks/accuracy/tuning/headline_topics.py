"""Sorts headlines by topic with a small transformer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, LENGTH, TOPICS = 4000, 32, 12


def make_headlines(amount):
    tokens = torch.randint(1, WORDS, (amount, LENGTH))
    topics = tokens[:, :3].sum(1) * TOPICS // (3 * WORDS)
    return tokens, topics


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.feed(self.between(x))


class TopicModel(nn.Module):
    def __init__(self, width=96, depth=4, heads=4, remat=0):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.top = nn.LayerNorm(width), nn.Linear(width, TOPICS)
        self.rounds = [remat // depth + (number < remat % depth) for number in range(depth)]

    def run(self, layer, x, rounds):
        if rounds and torch.is_grad_enabled():
            return checkpoint(self.run, layer, x, rounds - 1, use_reentrant=True, preserve_rng_state=False)
        return layer(x)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        for layer, rounds in zip(self.layers, self.rounds, strict=False):
            x = self.run(layer, x, rounds)
        return self.top(self.norm(x).mean(1))


class Callback:
    def after_step(self, session: Session) -> None:
        raise NotImplementedError


class Evaluation(Callback):
    def __init__(self, tokens, topics, every):
        self.tokens, self.topics, self.every = tokens, topics, every

    def after_step(self, session):
        if session.step % self.every:
            return
        session.model.eval()
        right = 0
        with torch.no_grad():
            for tokens, topics in zip(self.tokens.split(128), self.topics.split(128), strict=False):
                right += (session.model(tokens).argmax(1) == topics).sum().item()
        session.model.train()
        session.accuracy = right / len(self.tokens)


class Report(Callback):
    def after_step(self, session):
        if session.step % 50 == 0:
            print(f"{session.step}: loss {session.loss.item():.3f}, accuracy {session.accuracy:.3f}")


@dataclass
class Session:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    callbacks: list[Callback] = field(default_factory=list)
    step: int = 0
    loss: torch.Tensor | None = None
    accuracy: float = 0.0

    def fit(self, feed, steps):
        while self.step < steps:  # the training loop
            tokens, topics = next(feed)
            loss = F.cross_entropy(self.model(tokens), topics)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.loss = loss.detach()
            for callback in self.callbacks:
                callback.after_step(self)


def shuffled(tokens, topics, size):
    while True:
        for rows in torch.randperm(len(tokens)).split(size):
            yield tokens[rows], topics[rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--judged", type=int, default=0, help="headlines to judge after each ten steps")
    parser.add_argument("--remat", type=int, default=0, help="checkpoints, dealt out to the layers in turn")
    args = parser.parse_args()
    torch.manual_seed(31)
    tokens, topics = make_headlines(24 * 360)
    held_tokens, held_topics = make_headlines(args.judged or 64)
    model = TopicModel(remat=args.remat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    evaluation = Evaluation(held_tokens, held_topics, every=10 if args.judged else 50)
    session = Session(model, optimizer, [evaluation, Report()])
    session.fit(shuffled(tokens, topics, 24), args.steps)


if __name__ == "__main__":
    main()
