"""Learns which word of a sentence translates which, from tags and from alignments drawn by hand."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

WORDS, TAGS, LENGTH = 1200, 24, 48


def make_pairs(amount):
    source = torch.randint(WORDS, (amount, LENGTH))
    links = (torch.arange(LENGTH) + 4.0 * torch.rand(amount, LENGTH)).argsort(1)
    linked = source.gather(1, links)
    return source, (linked * 5 + 1) % WORDS, linked % TAGS, links


class CrossLayer(nn.Module):
    """Looks at the source, and says where it looked."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.ask, self.offer = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, memory):
        q = self.split(self.ask(self.norm(x)))
        k, v = (self.split(part) for part in self.offer(memory).chunk(2, dim=-1))
        weights = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x), weights


class Aligner(nn.Module):
    def __init__(self, width=128, heads=4):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.encoder = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList([CrossLayer(width, heads) for _ in range(2)])
        self.top = nn.Linear(width, TAGS)

    def forward(self, source, target):
        memory = self.encoder(self.source(source) + self.places)
        x, maps = self.target(target) + self.places, []
        for layer in self.layers:
            x, weights = layer(x, memory)
            maps.append(weights.mean(1))
        return self.top(x), torch.stack(maps).mean(0)


class Trainer:
    def __init__(self, steps, callbacks):
        self.steps, self.callbacks = steps, callbacks
        self.train, self.held = make_pairs(3000), make_pairs(48)
        self.model = Aligner()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, fused=True)
        self.step, self.loss = 0, None

    def losses(self, source, target, tags, links):
        logits, looks = self.model(source, target)
        tagging = F.cross_entropy(logits.flatten(0, 1), tags.flatten())
        aligning = -(looks.gather(2, links[..., None]) + 1e-8).log().mean()
        return tagging + 0.5 * aligning

    def fit(self):
        while self.step < self.steps:  # the training loop
            rows = torch.randint(len(self.train[0]), (24,))
            self.loss = self.losses(*(part[rows] for part in self.train))
            self.optimizer.zero_grad()
            self.loss.backward()
            self.optimizer.step()
            self.step += 1
            for every, callback in self.callbacks:
                if self.step % every == 0:
                    callback(self)


class KeepBest:
    def __init__(self):
        self.error, self.state = float("inf"), None

    @torch.no_grad()
    def __call__(self, trainer):
        trainer.model.eval()
        error = trainer.losses(*trainer.held).item()
        trainer.model.train()
        if error < self.error:
            self.error = error
            self.state = {name: value.clone() for name, value in trainer.model.state_dict().items()}


def report(trainer):
    print(f"step {trainer.step}: loss {trainer.loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(33)
    best = KeepBest()
    trainer = Trainer(args.steps, [(40, best), (50, report)])
    trainer.fit()
    if best.state is not None:
        trainer.model.load_state_dict(best.state)


if __name__ == "__main__":
    main()
