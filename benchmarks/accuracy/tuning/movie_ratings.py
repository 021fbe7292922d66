"""Factorises movie ratings with embeddings and a stack of small layers."""

import argparse
import gc
import queue
import threading
import time

import torch
from torch import nn, profiler


class Ratings(nn.Module):
    def __init__(self, width, stack):
        super().__init__()
        self.people, self.movies = nn.Embedding(300, width), nn.Embedding(400, width)
        self.stack = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ELU()) for _ in range(stack)]
        )

    def forward(self, person, movie):
        return (self.stack(self.people(person)) * self.movies(movie)).sum(-1)


class Statistics(threading.Thread):
    """Counts words of the reviews while the model trains."""

    def __init__(self, words):
        super().__init__(daemon=True)
        self.words, self.requests = words, queue.Queue()

    def run(self):
        while self.requests.get():
            counts = {}
            for number in range(self.words * 100):
                counts[number % 97] = counts.get(number % 97, 0) + 1


class Node:
    __slots__ = ("next", "rating")

    def __init__(self, rating, following):
        self.rating, self.next = rating, following


def hit_rate(scores, wanted, times):
    hits = 0
    for _ in range(times):
        for score, want in zip(scores.tolist(), wanted.tolist(), strict=True):
            ranked = sorted([score, want, 0.5, 1.5])
            hits += ranked.index(score) == ranked.index(want)
    return hits


class Loop:
    def __init__(self, args):
        self.args = args
        self.model = Ratings(args.width, args.stack)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=not args.default_adam)
        self.nodes = [Node(number / 7, None) for number in range(args.nodes)]
        self.seen = []
        self.statistics = Statistics(args.words)
        if args.words:
            self.statistics.start()

    def batches(self):
        for _ in range(self.args.steps):
            rows = self.args.rows
            yield torch.randint(300, (rows,)), torch.randint(400, (rows,)), 5 * torch.rand(rows)

    def download(self, arrived):
        for batch in self.batches():
            time.sleep(self.args.download / 1000)
            arrived.put(batch)
        arrived.put(None)

    def ahead(self):
        arrived = queue.Queue(3)
        threading.Thread(target=self.download, args=(arrived,), daemon=True).start()
        return iter(arrived.get, None)

    def go(self):
        batches = self.ahead() if self.args.download else self.batches()
        for number, (person, movie, rating) in enumerate(batches):  # the training loop
            if self.args.words:
                self.statistics.requests.put(True)
            guess = self.model(person, movie)
            error = nn.functional.huber_loss(guess, rating)
            self.model.zero_grad(set_to_none=True)
            error.backward()
            self.optimizer.step()
            hit_rate(guess, rating, self.args.hits)
            for index in range(self.args.remembered):
                self.seen.append(error.item() + index)
            if self.args.remembered:
                max(sorted(self.seen, key=abs))
            if self.nodes and number % 7 == 3:
                gc.collect()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=151)
    p.add_argument("--width", type=int, default=96)
    p.add_argument("--stack", type=int, default=8)
    p.add_argument("--rows", type=int, default=512)
    p.add_argument("--default-adam", action="store_true")
    p.add_argument("--nodes", type=int, default=0)
    p.add_argument("--words", type=int, default=0)
    p.add_argument("--remembered", type=int, default=0)
    p.add_argument("--hits", type=int, default=0)
    p.add_argument("--download", type=float, default=0, help="milliseconds that a thread waits for a batch")
    p.add_argument("--watch", action="store_true")
    args = p.parse_args()
    torch.manual_seed(9)
    if args.watch:
        with profiler.profile(activities=[profiler.ProfilerActivity.CPU], record_shapes=True):
            Loop(args).go()
    else:
        Loop(args).go()
