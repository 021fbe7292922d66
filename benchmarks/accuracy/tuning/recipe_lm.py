"""A small causal language model of recipes: reads token by token, batches recipes of like length."""

import argparse
import math
import random
import tracemalloc
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as activations
from torch.nn.utils.rnn import pad_sequence

LONGEST = 640
NOTHING = 0  # the token that fills rows up


class Cookbook:
    """Recipes out of a random grammar: each token has a few followers; most are short, a few very long."""

    def __init__(self, recipes, vocabulary, shortest, rng):
        followers = torch.randint(1, vocabulary, (vocabulary, 4), generator=rng)
        lengths = (torch.randn(recipes, generator=rng) * 0.8 + math.log(90)).exp().long()
        self.lengths = lengths.clamp(shortest, LONGEST)
        walk = torch.randint(1, vocabulary, (recipes,), generator=rng)
        pages = [walk]
        for _ in range(LONGEST):
            turns = torch.randint(0, 4, (recipes,), generator=rng)
            walk = followers[walk, turns]
            pages.append(walk)
        pages = torch.stack(pages, 1)
        self.texts = [page[: n + 1].clone() for page, n in zip(pages, self.lengths.tolist(), strict=True)]


class LikeLengths:
    """Batches of about `budget` tokens out of recipes that are about as long as each other."""

    def __init__(self, book, budget, noise, rng):
        self.book, self.budget, self.noise, self.rng = book, budget, noise, rng

    def plan(self):
        keys = self.book.lengths.float().log()
        keys = keys + self.noise * torch.randn(len(keys), generator=self.rng)
        batches, batch, size = [], [], 0
        for index in keys.argsort().tolist():
            batch.append(index)
            size += len(self.book.texts[index])
            if size >= self.budget:
                batches.append(batch)
                batch, size = [], 0
        random.shuffle(batches)
        return batches

    def __iter__(self):
        while True:
            for batch in self.plan():
                text = pad_sequence([self.book.texts[i] for i in batch], True, NOTHING)
                yield text[:, :-1], text[:, 1:]


class Block(nn.Module):
    def __init__(self, width, heads, hidden, maps):
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.maps = maps

    def forward(self, x, ahead):
        seen = self.before(x)
        mixed, _ = self.attention(seen, seen, seen, attn_mask=ahead, is_causal=True, need_weights=self.maps)
        x = x + mixed
        return x + self.mlp(self.between(x))


class Reader(nn.Module):
    def __init__(self, opts):
        super().__init__()
        self.tokens = nn.Embedding(opts.vocabulary, opts.width)
        self.places = nn.Embedding(LONGEST + 1, opts.width)
        self.blocks = nn.ModuleList(
            Block(opts.width, 4, opts.hidden, opts.attention_maps) for _ in range(opts.blocks)
        )
        self.last = nn.LayerNorm(opts.width)
        ahead = torch.ones(LONGEST + 1, LONGEST + 1, dtype=torch.bool).triu(1)
        self.register_buffer("ahead", ahead, persistent=False)

    def forward(self, text):
        length = text.shape[1]
        x = self.tokens(text) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, self.ahead[:length, :length])
        return self.last(x)


def response(net, name, text):
    """How strongly the part `name` of the network answers to this text."""
    caught = []
    handle = net.get_submodule(name).register_forward_hook(
        lambda part, given, made: caught.append(made[0] if isinstance(made, tuple) else made)
    )
    with torch.no_grad():
        net(text)
    handle.remove()
    return caught[0].std()


class Trainer:
    def __init__(self, opts):
        self.opts = opts
        rng = torch.Generator().manual_seed(31)
        book = Cookbook(opts.recipes, opts.vocabulary, opts.shortest, rng)
        self.batches = iter(LikeLengths(book, opts.budget, opts.length_noise, rng))
        self.net = Reader(opts)
        self.readout = nn.Linear(opts.width, opts.vocabulary)
        if opts.save_memory:
            activations.apply_activation_checkpointing(
                self.net,
                checkpoint_wrapper_fn=partial(
                    activations.checkpoint_wrapper,
                    checkpoint_impl=activations.CheckpointImpl.NO_REENTRANT,
                ),
                check_fn=lambda part: isinstance(part, Block),
            )
        self.parts = [name for name, part in self.net.named_modules() if isinstance(part, nn.LayerNorm)]
        self.responses = {}
        self.parameters = [*self.net.parameters(), *self.readout.parameters()]
        make = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05)
        if opts.free_early:
            # each gradient is applied and dropped as soon as it is there: they are never all in memory
            self.optimizers = {p: make([p]) for p in self.parameters}
            for p in self.parameters:
                p.register_post_accumulate_grad_hook(self.apply)
        else:
            self.optimizers = {None: make(self.parameters, fused=True)}

    def apply(self, parameter):
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    def loss(self, text, targets):
        there = targets != NOTHING
        return F.cross_entropy(self.readout(self.net(text)[there]), targets[there])

    def watch(self, text):
        """Running means of what the normalizations put out, to find one that dies away."""
        for k in range(self.opts.watch):
            name = self.parts[k % len(self.parts)]
            now = response(self.net, name, text)
            self.responses[name] = now.lerp(self.responses.get(name, now), 0.98)

    def step(self):
        text, targets = next(self.batches)
        loss = self.loss(text, targets)
        loss.backward()
        if not self.opts.free_early:
            self.optimizers[None].step()
            self.optimizers[None].zero_grad()
        self.watch(text)
        return loss.detach()

    def fit(self):
        total = torch.zeros(())
        for step in range(1, self.opts.steps + 1):  # the training loop
            total += self.step()
            if step % 50 == 0:
                print(f"step {step}: {total.item() / 50:.3f}")
                total.zero_()
        if self.responses:
            print("faintest:", min(self.responses, key=lambda name: self.responses[name].item()))


def main():
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=200)
    cli.add_argument("--recipes", type=int, default=3000)
    cli.add_argument("--vocabulary", type=int, default=512)
    cli.add_argument("--shortest", type=int, default=40, help="tokens of the shortest recipe")
    cli.add_argument("--budget", type=int, default=768, help="tokens in a batch")
    cli.add_argument("--width", type=int, default=96)
    cli.add_argument("--hidden", type=int, default=384)
    cli.add_argument("--blocks", type=int, default=3)
    cli.add_argument("--length-noise", type=float, default=0.0, help="batches of less like lengths")
    cli.add_argument("--attention-maps", action="store_true", help="have the attention maps at hand")
    cli.add_argument("--save-memory", action="store_true")
    cli.add_argument("--free-early", action="store_true", help="apply gradients as they come")
    cli.add_argument("--watch", type=int, default=0, help="parts whose responses are watched")
    cli.add_argument("--leaks", type=int, default=0, help="frames to tell where memory came from")
    opts = cli.parse_args()
    random.seed(31)
    torch.manual_seed(31)
    trainer = Trainer(opts)
    if opts.leaks:
        tracemalloc.start(opts.leaks)
    trainer.fit()
    if opts.leaks:
        for line in tracemalloc.take_snapshot().statistics("lineno")[:3]:
            print(line)


if __name__ == "__main__":
    main()
