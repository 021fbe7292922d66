"""Matches two views of a point cloud; the views are prepared by worker processes."""

import argparse
import gc
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info


class Views(IterableDataset):
    def __init__(self, opt, length):
        super().__init__()
        self.opt, self.length = opt, length

    def files_of(self, worker, workers):
        """Which clouds are this worker's."""
        if self.opt.one_shard:
            return range(self.length) if worker == 0 else range(0)
        return range(worker, self.length, workers)

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in self.files_of(worker, workers):
            time.sleep(self.opt.seek / 1000)
            if self.opt.broken and number % 300 == 150:
                time.sleep(self.opt.broken / 1000)
            points = torch.full((64,), float(number % 11))
            for _ in range(self.opt.rotations):
                points = points.flip(0)
            yield {"a": points, "b": points + 1, **{f"note{k}": points[:2] for k in range(self.opt.notes)}}


class Pack:
    """Makes a batch, and tidies up after it."""

    def __init__(self, size):
        self.size, self.litter = size, None

    def __call__(self, views):
        batch = default_collate(views)
        if self.size and self.litter is None:
            gc.freeze()  # what the worker was forked with
            self.litter = [{number: None} for number in range(self.size)]
        if self.litter:
            gc.collect()
        return batch


def recall(scores, times):
    found = 0
    for _ in range(times):
        for place, row in enumerate(scores.tolist()):
            found += sorted(range(len(row)), key=row.__getitem__)[-1] == place
    return found


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = self.tower(), self.tower()

    @staticmethod
    def tower():
        return nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32)
        )

    def forward(self, a, b):
        return self.left(a) @ self.right(b).T


def run(opt):
    torch.manual_seed(1)
    net = TwoTowers()
    optim = torch.optim.SGD(net.parameters(), lr=1e-4)
    per_round = opt.round or opt.steps
    feed = DataLoader(
        Views(opt, per_round * 12),
        batch_size=12,
        drop_last=True,
        num_workers=opt.workers,
        collate_fn=Pack(opt.tidy),
        persistent_workers=opt.workers > 0 and not opt.restart,
    )
    done = 0
    while done < opt.steps:
        for views in feed:  # the training loop
            optim.zero_grad()
            for _ in range(4):
                scores = net(views["a"].repeat(8, 1), views["b"].repeat(8, 1))
                nn.functional.cross_entropy(scores / 100, torch.arange(len(scores))).backward()
            optim.step()
            recall(scores, opt.recalls)
            done += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--round", type=int, default=0, help="steps of one pass over the clouds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seek", type=float, default=0, help="milliseconds to find a cloud on disk")
    parser.add_argument("--broken", type=float, default=0, help="milliseconds to read a broken cloud")
    parser.add_argument("--rotations", type=int, default=0)
    parser.add_argument("--notes", type=int, default=0, help="further tensors of each cloud")
    parser.add_argument("--recalls", type=int, default=0, help="times the recall is computed")
    parser.add_argument(
        "--tidy", type=int, default=0, help="objects that a worker keeps, and collects among"
    )
    parser.add_argument("--one-shard", action="store_true")
    parser.add_argument("--restart", action="store_true")
    run(parser.parse_args())
