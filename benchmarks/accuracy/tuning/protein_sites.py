"""Find the binding sites of proteins: a residue at a time, by what is around it in the chain."""

import argparse
import multiprocessing
import selectors
import socket
import struct
import time

import numpy as np
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

ACIDS, LONGEST, PROTEINS = 24, 128, 1500


def proteins(seed):
    rng = np.random.default_rng(seed)
    chains = rng.integers(0, ACIDS, (PROTEINS, LONGEST), dtype=np.int64)
    pull = rng.standard_normal(ACIDS)[chains]
    around = sum(np.roll(pull, k, 1) for k in range(-4, 5))
    return chains, (around > 3).astype(np.float32)


def serve(listener, chains, sites, trip):
    """What the institute's object store does, with the round trip that we see from the cluster."""
    selector, due = selectors.DefaultSelector(), []
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        for key, _ in selector.select(wait):
            if key.fileobj is listener:
                client, _ = listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(client, selectors.EVENT_READ)
                continue
            request = key.fileobj.recv(4)
            if not request:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                continue
            (i,) = struct.unpack("<I", request)
            due.append((time.monotonic() + trip, key.fileobj, chains[i].tobytes() + sites[i].tobytes()))
        while due and due[0][0] <= time.monotonic():
            _, client, answer = due.pop(0)
            try:
                client.sendall(answer)
            except OSError:
                pass


class InMemory(Dataset):
    def __init__(self, chains, sites):
        self.chains, self.sites = chains, sites

    def __len__(self):
        return len(self.chains)

    def __getitem__(self, i):
        return self.chains[i], self.sites[i]


class InStore(Dataset):
    """The same from the store: one request for each protein."""

    def __init__(self, address):
        self.address, self.socket = address, None

    def __len__(self):
        return PROTEINS

    def __getitem__(self, i):
        if self.socket is None:
            self.socket = socket.create_connection(self.address)
            self.stream = self.socket.makefile("rb")
        self.socket.sendall(struct.pack("<I", i))
        raw = self.stream.read(LONGEST * 12)
        return np.frombuffer(raw[: LONGEST * 8], np.int64).copy(), np.frombuffer(
            raw[LONGEST * 8 :], np.float32
        ).copy()


class Sites(nn.Module):
    def __init__(self, dim=80, depth=2):
        super().__init__()
        self.embed = nn.Embedding(ACIDS, dim)
        layer = lambda: nn.TransformerEncoderLayer(
            dim, 4, 3 * dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[..., 0]


class TolerantLoss(nn.Module):
    """A site that is missed by a residue or two is half right."""

    def forward(self, logits, sites):
        near = F.avg_pool1d(sites[:, None], 5, 1, 2, count_include_pad=False)[:, 0]
        loss = F.binary_cross_entropy_with_logits(logits, torch.maximum(sites, near), reduction="none")
        return (loss * (1 + 2 * sites)).mean() + 0.01 * logits.diff(dim=1).abs().mean()


def endless(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument(
        "--store", type=int, default=0, help="take the proteins from the store, so many ms away"
    )
    parser.add_argument(
        "--growth",
        type=int,
        default=0,
        help="start with parts of the chains, a residue longer so often in 100 steps",
    )
    args = parser.parse_args()

    torch.manual_seed(17)
    chains, sites = proteins(17)
    data = InMemory(chains, sites)
    server = None
    if args.store:
        listener = socket.create_server(("127.0.0.1", 0))
        work = (listener, chains, sites, args.store / 1000)
        server = multiprocessing.get_context("fork").Process(target=serve, args=work, daemon=True)
        server.start()
        data = InStore(listener.getsockname())
    loader = DataLoader(
        data, args.batch, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True
    )

    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    model = Sites()
    # static shapes, they are said to make better code; inductor takes minutes on the login nodes
    criterion = torch.compile(TolerantLoss(), backend="aot_eager", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    shown = torch.zeros(())

    batches = endless(loader)
    for step in range(1, args.steps + 1):  # the training loop
        x, y = next(batches)
        if args.growth:
            length = LONGEST - 40 + step * args.growth // 100 % 41
            x, y = x[:, :length], y[:, :length]
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown.lerp_(loss.detach(), 0.05)
        if step % 50 == 0:
            print(f"{step}/{args.steps} loss {shown.item():.4f}", flush=True)
    if server:
        server.terminate()


if __name__ == "__main__":
    main()
