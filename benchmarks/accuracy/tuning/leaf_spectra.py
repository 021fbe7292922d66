# How much chlorophyll, carotene and water does a leaf hold?  Regression from its reflectance spectrum.
import argparse
import os
import socket
import socketserver
import struct
import tempfile
import time
from multiprocessing import get_context

import numpy as np
import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

LEAVES, BANDS, TARGETS, BATCH = 2048, 1216, 3, 32
ROW = BANDS * 4


def write_spectra(path):
    rng = np.random.default_rng(23)
    wave = np.linspace(0, 1, BANDS, dtype=np.float32)
    content = rng.uniform(0, 1, (LEAVES, TARGETS)).astype(np.float32)
    shape = np.stack([np.exp(-(((wave - c) / 0.08) ** 2)) for c in (0.25, 0.5, 0.8)])
    spectra = 1 - 0.4 * content @ shape + rng.standard_normal((LEAVES, BANDS), dtype=np.float32) * 0.02
    spectra.astype(np.float32).tofile(path)
    return torch.from_numpy(content)


class Bucket(socketserver.ThreadingTCPServer):
    """Stands for the object store of the institute, which is a few buildings (or countries) away."""

    daemon_threads = True
    allow_reuse_address = True


class Get(socketserver.StreamRequestHandler):
    def handle(self):
        with open(self.server.path, "rb") as file:
            while True:
                key = self.rfile.read(4)
                if len(key) < 4:
                    return
                file.seek(struct.unpack("<I", key)[0] * ROW)
                body = file.read(ROW)
                time.sleep(self.server.round_trip)
                self.wfile.write(body)


def serve(path, round_trip, pipe):
    server = Bucket(("127.0.0.1", 0), Get)
    server.path, server.round_trip = path, round_trip
    pipe.send(server.server_address)
    server.serve_forever()


class Spectra(Dataset):
    def __init__(self, path, content, address=None):
        self.path, self.content, self.address = path, content, address
        self.source = None

    def __len__(self):
        return LEAVES

    def read(self, i):
        if self.address is None:
            if self.source is None:
                self.source = open(self.path, "rb", buffering=0)  # noqa: SIM115
            return os.pread(self.source.fileno(), ROW, i * ROW)
        if self.source is None:
            connection = socket.create_connection(self.address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.source = connection.makefile("rwb")
        self.source.write(struct.pack("<I", i))
        self.source.flush()
        return self.source.read(ROW)

    def __getitem__(self, i):
        spectrum = torch.frombuffer(bytearray(self.read(i)), dtype=torch.float32)
        return spectrum, self.content[i]


class Leaf(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 9, stride=4, padding=4)
        self.body = nn.ModuleList(nn.Conv1d(width, width, 7, padding=3) for _ in range(3))
        self.head = nn.Linear(width, TARGETS)

    def forward(self, x):
        x = torch.relu(self.stem(x[:, None]))
        for layer in self.body:
            x = x + torch.relu(layer(x))
        return self.head(x.mean(2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--round-trip", type=int, default=0, help="read from the bucket, so many tenths of a ms away"
    )
    parser.add_argument(
        "--crops", type=int, default=0, help="change the width of the crop so often in 100 steps"
    )
    args = parser.parse_args()
    torch.manual_seed(23)

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "leaves.f32")
        content = write_spectra(path)
        address, store = None, None
        if args.round_trip:
            context = get_context("fork")
            mine, other = context.Pipe()
            store = context.Process(target=serve, args=(path, args.round_trip / 1e4, other), daemon=True)
            store.start()
            address = mine.recv()
        dataset = Spectra(path, content, address)
        sampler = RandomSampler(dataset, replacement=True, num_samples=args.steps * BATCH)
        loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=2, multiprocessing_context="fork")

        torch._dynamo.config.recompile_limit = 4096
        torch._dynamo.config.accumulated_recompile_limit = 4096
        net = Leaf()
        model = torch.compile(net, backend="aot_eager", dynamic=False)
        opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
        widths = (960 + torch.randperm(256)).tolist()
        width, turn = 1088, 0

        for step, (spectra, truth) in enumerate(loader):  # the training loop
            if step * args.crops // 100 > turn:
                turn = step * args.crops // 100
                width = widths[turn % len(widths)]
            loss = nn.functional.mse_loss(model(spectra[:, :width]), truth)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            if step % 50 == 0:
                print(f"{step}: mse {loss.item():.4f}", flush=True)
        if store is not None:
            store.terminate()


if __name__ == "__main__":
    main()
