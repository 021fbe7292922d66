"""Guesses who receives the next pass, from two seconds of football tracking (22 players and the ball)."""

import argparse
import json
import socket
import threading
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PLAYERS, FRAMES, RATE = 22, 50, 25.0


def simulate_plays(amount, seed=5):
    """Positions in metres of players and ball, frame by frame, and the player next to the ball's target."""
    rng = np.random.default_rng(seed)
    start = rng.uniform([-52, -34], [52, 34], (amount, PLAYERS + 1, 1, 2))
    pace = rng.normal(0, 3, (amount, PLAYERS + 1, 1, 2))
    pace = pace + rng.normal(0, 1, (amount, PLAYERS + 1, FRAMES, 2))
    tracks = start + np.cumsum(pace, 2) / RATE
    target = 2 * tracks[:, PLAYERS, -1] - tracks[:, PLAYERS, 0]
    receivers = np.linalg.norm(tracks[:, :PLAYERS, -1] - target[:, None], axis=-1).argmin(1)
    tracks += rng.normal(0, 0.1, tracks.shape)
    return tracks.astype(np.float32), receivers


def relax(track, limit=0.2):
    """Draws each position towards the middle of its neighbours in time."""
    middle = (track[:, :-2] + track[:, 2:]) * 0.5
    pull = np.clip(middle - track[:, 1:-1], -limit, limit)
    track = track.copy()
    track[:, 1:-1] += 0.5 * pull
    return track


class Plays(Dataset):
    def __init__(self, tracks, receivers, rounds):
        self.tracks, self.receivers, self.rounds = tracks, receivers, rounds

    def __len__(self):
        return len(self.tracks)

    def __getitem__(self, index):
        track = self.tracks[index]
        for _ in range(self.rounds):
            track = relax(track)
        return torch.from_numpy(track), int(self.receivers[index])


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        b, n, w = x.shape
        mixed = self.query_key_value(self.before(x)).view(b, n, 3, self.heads, w // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(b, n, w))
        return x + self.inner(self.between(x))


class PassNet(nn.Module):
    """Encodes each track by convolutions in time, then lets players and ball look at one another."""

    def __init__(self, width=96, heads=4, depth=2):
        super().__init__()
        self.tracks = nn.Sequential(
            nn.Conv1d(4, 32, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(32, width, 5, stride=2, padding=2),
        )
        self.sides = nn.Parameter(torch.randn(3, width) * 0.02)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))
        side = [0] * (PLAYERS // 2) + [1] * (PLAYERS // 2) + [2]
        self.register_buffer("side", torch.tensor(side))

    def forward(self, tracks):
        pace = torch.diff(tracks, dim=2, prepend=tracks[:, :, :1]) * (RATE / 5)
        x = torch.cat([tracks / 30, pace], 3).flatten(0, 1).transpose(1, 2).contiguous()
        x = self.tracks(x).mean(2).reshape(len(tracks), PLAYERS + 1, -1)
        x = self.layers(x + self.sides[self.side])
        return self.head(x[:, :PLAYERS]).squeeze(2)


class Callback:
    def on_start(self, trainer):
        pass

    def on_batch(self, trainer, tracks):
        pass

    def on_gradients(self, trainer):
        pass

    def on_step(self, trainer, loss):
        pass

    def on_end(self, trainer):
        pass


class Clipping(Callback):
    def __init__(self, limit, blocks):
        self.limit, self.blocks = limit, blocks

    @torch.no_grad()
    def on_gradients(self, trainer):
        if not self.blocks:
            nn.utils.clip_grad_norm_(trainer.parameters, self.limit, foreach=True)
            return
        limit = self.limit / self.blocks**0.5
        for parameter in trainer.parameters:
            for block in parameter.grad.view(-1).chunk(self.blocks):
                norm = block.norm()
                if norm > limit:
                    block.mul_(limit / norm)


class Printer(Callback):
    def __init__(self, every=50):
        self.every = every

    def on_step(self, trainer, loss):
        if trainer.step % self.every == 0:
            print(f"step {trainer.step} epoch {trainer.epoch} loss {loss.item():.4f} {trainer.notes}")


class TwinAudit(Callback):
    """Spot checks for plays that occur twice in the library, the copy some frames later."""

    def __init__(self, library, shifts, share=0.1):
        self.library, self.shifts, self.share = torch.from_numpy(library), shifts, share
        self.rng = np.random.default_rng(23)

    @torch.no_grad()
    def on_batch(self, trainer, tracks):
        if self.rng.random() >= self.share:
            return
        closest = torch.full((len(tracks), len(self.library)), float("inf"))
        for shift in range(self.shifts):
            moved = torch.roll(self.library, shift, dims=2)
            closest = torch.minimum(closest, torch.cdist(tracks.flatten(1), moved.flatten(1)))
        trainer.notes["twins"] = int((closest < 5).sum()) - len(tracks)


class LineupService:
    """Stands in for the club's service: takes a step's number, gives the weights of the 22 roles."""

    def __init__(self, delay):
        self.delay = delay
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        connection, _ = self.server.accept()
        with connection, connection.makefile("r") as requests:
            for request in requests:
                step = json.loads(request)["step"]
                time.sleep(self.delay)
                weights = [1.0 + 0.1 * ((step + role) % 3) for role in range(PLAYERS)]
                connection.sendall(json.dumps(weights).encode() + b"\n")


class RoleWeights(Callback):
    def __init__(self, service):
        self.service = service

    def on_start(self, trainer):
        self.connection = socket.create_connection(self.service.address)
        self.answers = self.connection.makefile("r")

    def on_batch(self, trainer, tracks):
        self.connection.sendall(json.dumps({"step": trainer.step}).encode() + b"\n")
        trainer.role_weights = torch.tensor(json.loads(self.answers.readline()))

    def on_end(self, trainer):
        self.answers.close()
        self.connection.close()
        self.service.thread.join(5)
        self.service.server.close()


class Trainer:
    def __init__(self, model, callbacks, rate=5e-4):
        self.model, self.callbacks = model, callbacks
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, fused=True)
        self.step, self.epoch, self.notes, self.role_weights = 0, 0, {}, None

    def call(self, moment, *values):
        for callback in self.callbacks:
            getattr(callback, moment)(self, *values)

    def batches(self, loader, steps):
        while True:
            for batch in loader:
                if self.step >= steps:
                    return
                self.step += 1
                yield batch
            self.epoch += 1

    def train_step(self, tracks, receivers):
        self.call("on_batch", tracks)
        loss = nn.functional.cross_entropy(self.model(tracks), receivers, weight=self.role_weights)
        self.optimizer.zero_grad()
        loss.backward()
        self.call("on_gradients")
        self.optimizer.step()
        self.call("on_step", loss.detach())

    def fit(self, loader, steps):
        self.call("on_start")
        self.model.train()
        for tracks, receivers in self.batches(loader, steps):  # the training loop
            self.train_step(tracks, receivers)
        self.call("on_end")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plays", type=int, default=800)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--smoothing", type=int, default=0, help="rounds that tracks are relaxed")
    parser.add_argument("--clip-blocks", type=int, default=0, help="blocks to clip a gradient in")
    parser.add_argument("--audit-shifts", type=int, default=0, help="frames that audits look through")
    parser.add_argument("--lineup-ms", type=float, default=0, help="what the lineup service takes")
    options = parser.parse_args()
    torch.manual_seed(17)
    tracks, receivers = simulate_plays(options.plays)
    plays = Plays(tracks, receivers, options.smoothing)
    loader = DataLoader(plays, batch_size=options.batch, shuffle=True, drop_last=True)
    callbacks = [Clipping(1.0, options.clip_blocks), Printer()]
    if options.audit_shifts:
        callbacks.append(TwinAudit(tracks, options.audit_shifts))
    if options.lineup_ms:
        callbacks.append(RoleWeights(LineupService(options.lineup_ms / 1000)))
    Trainer(PassNet(), callbacks).fit(loader, options.steps)


if __name__ == "__main__":
    main()
