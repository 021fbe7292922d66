"""Tags words in sentences of different lengths with a small convolutional network."""

import argparse
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

WORDS, TAGS, BATCH = 500, 12, 32


class Tagger(nn.Module):
    def __init__(self, debug_layers):
        super().__init__()
        self.words = nn.Embedding(WORDS, 48)
        self.encoder = nn.Sequential(
            nn.Conv1d(48, 128, 5, padding=2), nn.ReLU(), nn.Conv1d(128, 96, 5, padding=2), nn.ReLU()
        )
        self.tags = nn.Linear(96, TAGS)
        self.debug_layers = debug_layers

    def forward(self, sentences):
        embedded = self.words(sentences)
        for _ in range(self.debug_layers):
            embedded = embedded * 1.0
            torch._dynamo.graph_break()
        return self.tags(self.encoder(embedded.transpose(1, 2)).transpose(1, 2))


def make_batches(count, pad_to, rng):
    batches = []
    for _ in range(count):
        sentences = [torch.randint(1, WORDS, (rng.randint(30, 36),)) for _ in range(BATCH)]
        padded = pad_sequence(sentences, batch_first=True)
        if pad_to > padded.shape[1]:
            padded = nn.functional.pad(padded, (0, pad_to - padded.shape[1]))
        batches.append(padded)
    return batches


def confusion(logits, wanted, rounds):
    counts = {}
    for _ in range(rounds):
        for guess, truth in zip(logits.argmax(-1).flatten(), wanted.flatten(), strict=True):
            key = guess.item(), truth.item()
            counts[key] = counts.get(key, 0) + 1
    return counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pad-to", type=int, default=0)
    parser.add_argument("--metric-rounds", type=int, default=0)
    parser.add_argument("--compile-each-length", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--debug-layers", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    tagger = Tagger(args.debug_layers)
    model = tagger
    if args.compile_each_length or args.compile:
        model = torch.compile(tagger, backend="eager", dynamic=not args.compile_each_length)
    if args.compile_each_length:
        torch._dynamo.config.recompile_limit = 1000
    optimizer = torch.optim.SGD(tagger.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    batches = make_batches(args.steps, args.pad_to, random.Random(0))
    for number, sentences in enumerate(batches):  # the training loop
        if args.compile_each_length:
            sentences = nn.functional.pad(sentences, (0, number % 40))
        wanted = sentences % TAGS
        logits = model(sentences)
        loss = criterion(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        confusion(logits, wanted, args.metric_rounds)


if __name__ == "__main__":
    main()
