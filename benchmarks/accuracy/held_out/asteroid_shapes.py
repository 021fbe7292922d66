"""Sorts asteroids by their radar shapes: round, long, double, top.

The shapes lie in an archive, a service beside the training. Two loaders ask it for one asteroid at a time.
"""

import argparse
import multiprocessing
import os
import socket
import socketserver
import struct
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

POINTS, FORMS = 192, 4


def shapes(count, seed):
    rng = np.random.default_rng(seed)
    forms = rng.integers(0, FORMS, count)
    points = rng.normal(size=(count, POINTS, 3))
    points /= np.linalg.norm(points, axis=2, keepdims=True)
    points[forms == 1] *= [1.8, 0.7, 0.7]
    points[forms == 2] += np.sign(points[forms == 2][..., :1]) * [0.8, 0, 0]
    points[forms == 3] *= 1.3 - np.abs(points[forms == 3][..., 2:])
    return (points + rng.normal(0, 0.05, points.shape)).astype(np.float32), forms


class Archive(socketserver.ThreadingUnixStreamServer):
    """Answers a number with a form and the points."""

    daemon_threads = True

    def __init__(self, address, count, distance_ms):
        self.points, self.forms = shapes(count, 433)
        self.distance = distance_ms / 1000
        super().__init__(address, Clerk)


class Clerk(socketserver.StreamRequestHandler):
    def handle(self):
        while asked := self.rfile.read(4):
            (number,) = struct.unpack("<I", asked)
            if self.server.distance:
                time.sleep(self.server.distance)
            form = int(self.server.forms[number])
            self.wfile.write(struct.pack("<I", form) + self.server.points[number].tobytes())


class Asteroids(Dataset):
    def __init__(self, address, count):
        self.address, self.count, self.line = address, count, None

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if self.line is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self.address)
            self.line = connection.makefile("rwb")
        self.line.write(struct.pack("<I", number % self.count))
        self.line.flush()
        (form,) = struct.unpack("<I", self.line.read(4))
        points = np.frombuffer(bytearray(self.line.read(POINTS * 12)), np.float32)
        return points.reshape(POINTS, 3), form


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 64, 128, 320]
        each = []
        for before, after in zip(widths, widths[1:]):
            each += [nn.Linear(before, after), nn.ReLU()]
        self.each = nn.Sequential(*each)
        self.whole = nn.Sequential(nn.Linear(320, 128), nn.ReLU(), nn.Linear(128, FORMS))

    def forward(self, points):
        return self.whole(self.each(points).amax(1))


def train(args, address):
    torch.manual_seed(433)
    data = Asteroids(address, 2000)
    order = torch.randint(2000, (args.steps * 32,)).tolist()
    loader = DataLoader(data, 32, sampler=order, num_workers=2, multiprocessing_context="fork")
    net = PointNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    for step, (points, forms) in enumerate(loader):  # the training loop
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(net(points), forms)
        loss.backward()
        optimizer.step()
        if args.cool_ms:
            time.sleep(args.cool_ms / 1000)
        if step % 40 == 0:
            print(f"step {step:4d}: {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--distance", type=float, default=0, help="milliseconds to the archive")
    parser.add_argument(
        "--cool-ms", type=float, default=0, help="lets a laptop cool down, milliseconds a step"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = os.path.join(folder, "archive")
        archive = Archive(address, 2000, args.distance)
        process = multiprocessing.get_context("fork").Process(target=archive.serve_forever, daemon=True)
        process.start()
        train(args, address)
        process.terminate()
