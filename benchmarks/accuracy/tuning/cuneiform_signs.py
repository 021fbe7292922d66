"""Reads cuneiform: wedges pressed into clay, 28 by 28, of thirty signs.

The photographs are with the museum; its server hands out a tray of them on request, one request after the other.
"""

import argparse
import multiprocessing
import socket
import socketserver
import struct
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SIDE, SIGNS, TRAY, TRAYS = 28, 30, 64, 48


def press(rng, kinds):
    """Wedges are short strokes; a sign is five of them."""
    plan = np.random.default_rng(99)
    signs = np.zeros((SIGNS, SIDE, SIDE), np.float32)
    for sign in signs:
        for _ in range(5):
            top, left = plan.integers(0, SIDE - 8, 2)
            for k in range(8):
                sign[top + (k if plan.random() < 0.5 else 0), left + k] = 1
    clay = signs[kinds] * 160 + rng.normal(60, 25, (len(kinds), SIDE, SIDE))
    return clay.clip(0, 255).astype(np.uint8)


class Museum(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, trays, pause):
        super().__init__(("127.0.0.1", 0), Desk)
        self.trays, self.pause = trays, pause


class Desk(socketserver.StreamRequestHandler):
    def handle(self):
        (number,) = struct.unpack("!I", self.rfile.read(4))
        time.sleep(self.server.pause)
        self.wfile.write(self.server.trays[number])


class Trays(Dataset):
    def __init__(self, address, kinds):
        self.address, self.kinds = address, kinds

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, number):
        with socket.create_connection(self.address) as line:
            line.sendall(struct.pack("!I", number))
            with line.makefile("rb") as answer:
                clay = np.frombuffer(bytearray(answer.read()), np.uint8)
        return torch.from_numpy(clay.reshape(TRAY, 1, SIDE, SIDE)), self.kinds[number]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 16, 5, padding=2)
        self.c2 = nn.Conv2d(16, 32, 3, padding=1)
        self.c3 = nn.Conv2d(32, 48, 3, padding=1)
        self.f1 = nn.Linear(48 * 9, 96)
        self.f2 = nn.Linear(96, SIGNS)

    def forward(self, clay):
        x = (clay.float() - 70) / 50
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        x = F.max_pool2d(F.relu(self.c3(x)), 2)
        return self.f2(F.relu(self.f1(x.flatten(1))))


@torch.inference_mode()
def proofread(reader, clay, kinds):
    reader.eval()
    right = 0
    for some, truth in zip(clay, kinds):
        right += int((reader(some).argmax(1) == truth).sum())
    reader.train()
    return right / (TRAY * len(clay))


def main(args):
    torch.manual_seed(2)
    rng = np.random.default_rng(2)
    kinds = rng.integers(0, SIGNS, (TRAYS, TRAY))
    museum = Museum([press(rng, row).tobytes() for row in kinds], args.museum / 1000)
    fork = multiprocessing.get_context("fork")
    server = fork.Process(target=museum.serve_forever, daemon=True)
    server.start()

    unseen = rng.integers(0, SIGNS, (max(4, args.proofs), TRAY))
    test_clay = [torch.from_numpy(press(rng, row)).unsqueeze(1) for row in unseen]
    test_kinds = torch.from_numpy(unseen)

    order = [number % TRAYS for number in rng.permutation(max(TRAYS, args.steps))[: args.steps].tolist()]
    loader = DataLoader(
        Trays(museum.server_address, torch.from_numpy(kinds)),
        batch_size=None,
        sampler=order,
        num_workers=2,
        prefetch_factor=2,
        multiprocessing_context="fork",
    )
    reader = Reader()
    optimizer = torch.optim.SGD(reader.parameters(), lr=0.02, momentum=0.9, fused=True)
    for step, (clay, signs) in enumerate(loader, 1):  # the training loop
        loss = F.cross_entropy(reader(clay), signs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.proofs and step % 8 == 0:
            proofread(reader, test_clay[: args.proofs], test_kinds)
        if step % 100 == 0:
            print(
                f"{step}: {loss.item():.3f}, {proofread(reader, test_clay[:4], test_kinds):.1%} of unseen signs"
            )
    server.terminate()
    server.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--museum", type=float, default=0, help="milliseconds for which the museum looks for a tray"
    )
    parser.add_argument("--proofs", type=int, default=0, help="trays to proofread after every eighth step")
    main(parser.parse_args())
