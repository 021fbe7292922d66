# Piano transcription: which of 88 keys sound in each frame of a spectrogram.
# Pieces are synthetic and live in memory; the journal goes to a scratch folder.

import argparse
import json
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
ap.add_argument("--batch", type=int, default=16)
ap.add_argument("--frames", type=int, default=160)
ap.add_argument("--cuts", type=int, default=0, help="thresholds tried for the F1 of each key")
ap.add_argument("--journal", type=int, default=0, help="cells of the roll that go to the journal")
ap.add_argument("--console", type=float, default=0, help="ms to listen for a command of the operator")
ap.add_argument("--chords", type=int, default=0, help="chords that the catalogue counts per round")
ap.add_argument("--previews", type=int, default=0, help="thousand samples of a rendered preview")
ap.add_argument("--cores", type=int, default=0, help="as on the machine where it was tuned")
ap.add_argument("--reproducible", action="store_true", help="sum in the same order everywhere")
ap.add_argument("--maps", action="store_true", help="keep where the last batch looked")
ap.add_argument("--events", action="store_true", help="keep the events of the run, for the viewer")
ARGS = ap.parse_args()

CFG = {
    "mels": 64,
    "keys": 88,
    "pieces": 32,
    "piece_frames": 1500,
    "width": 64,
    "heads": 4,
    "blocks": 2,
    "optimizer": {"lr": 2e-3, "weight_decay": 0.01, "fused": True},
    "rare": 6.0,
}

torch.manual_seed(88)
DICE = torch.Generator().manual_seed(12)
if ARGS.cores:
    torch.set_num_threads(ARGS.cores)
if ARGS.reproducible:
    torch.set_num_threads(1)

TONES = ["C", "C#", "D", "Eb", "E", "F", "F#", "G", "Ab", "A", "Bb", "B"]
KINDS = ["", "m", "7", "maj7", "dim"]

PREVIEW = """
import math, os, sys, time
home, amount, tone = int(sys.argv[1]), int(sys.argv[2]) * 1000, float(sys.argv[3])
while os.getppid() == home:
    wave = [math.sin(tone * n) for n in range(amount)]
    time.sleep(0.03)
"""


def compose():
    roll = torch.rand(CFG["pieces"], CFG["piece_frames"] // 5, CFG["keys"], generator=DICE) < 0.05
    roll = roll.repeat_interleave(5, 1).float()
    timbre = torch.rand(CFG["keys"], CFG["mels"], generator=DICE)
    heard = roll @ timbre + 0.3 * torch.randn(*roll.shape[:2], CFG["mels"], generator=DICE)
    return heard.transpose(1, 2).contiguous(), roll.transpose(1, 2).contiguous()


def windows(pieces):
    return pieces.unfold(2, ARGS.frames, 1)


def draw(heard, roll):
    piece = torch.randint(CFG["pieces"], (ARGS.batch,), generator=DICE)
    start = torch.randint(heard.shape[2], (ARGS.batch,), generator=DICE)
    return heard[piece, :, start], roll[piece, :, start]


class Listener(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.look = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.map = None

    def forward(self, x):
        h = self.before(x)
        seen, where = self.look(h, h, h, need_weights=ARGS.maps)
        if where is not None:
            self.map = where.detach()
        x = x + seen
        return x + self.mix(x)


class Transcriber(nn.Module):
    def __init__(self):
        super().__init__()
        width = CFG["width"]
        self.ears = nn.Conv1d(CFG["mels"], width, 5, padding=2)
        self.blocks = nn.Sequential(*[Listener(width, CFG["heads"]) for _ in range(CFG["blocks"])])
        self.keys = nn.Linear(width, CFG["keys"])

    def forward(self, heard):
        x = F.gelu(self.ears(heard)).transpose(1, 2)
        return self.keys(self.blocks(x))


class Board:
    """The threshold at which the keys are told best."""

    def __init__(self, cuts):
        self.grid = np.linspace(-3, 3, cuts)
        self.logits = self.truth = None

    def show(self, logits, truth):
        self.logits = logits.detach().flatten(0, 1).numpy()
        self.truth = truth.transpose(1, 2).flatten(0, 1).numpy() > 0.5

    def f1(self, cut):
        told = self.logits > cut
        right = (told & self.truth).sum(0)
        return (2 * right / np.maximum(1, told.sum(0) + self.truth.sum(0))).mean()

    @property
    def best(self):
        return max(((self.f1(cut), cut) for cut in self.grid), default=(0.0, 0.0))


class Catalogue(threading.Thread):
    """Counts the chords of the pieces for the index page."""

    def __init__(self, amount):
        super().__init__(daemon=True)
        self.amount, self.closed, self.counts = amount, threading.Event(), Counter()

    def run(self):
        while not self.closed.wait(0.03):
            counts = Counter()
            for n in range(self.amount):
                counts[TONES[n * 7 % 12] + KINDS[n % 5]] += 1
            self.counts = counts


def open_journal(folder):
    journal = logging.getLogger("journal")
    journal.setLevel(logging.DEBUG)
    journal.propagate = False
    handler = logging.FileHandler(os.path.join(folder, "journal.log"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    journal.addHandler(handler)
    return journal


def render_previews():
    """Left and right channel, each by a program of its own."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", PREVIEW, str(os.getpid()), str(ARGS.previews), str(tone)],
            start_new_session=True,
        )
        for tone in ((0.031, 0.047) if ARGS.previews else ())
    ]


scratch = tempfile.TemporaryDirectory()
heard, roll = map(windows, compose())
model = Transcriber()
optimizer = torch.optim.AdamW(model.parameters(), **CFG["optimizer"])
rare = torch.tensor(CFG["rare"])
board = Board(ARGS.cuts)
journal = open_journal(scratch.name)
operator, console = socket.socketpair()
catalogue = Catalogue(ARGS.chords)
if ARGS.chords:
    catalogue.start()
previews = render_previews()
recorder = torch.profiler.profile(with_stack=True, record_shapes=True)
if ARGS.events:
    recorder.start()
losses = torch.zeros(ARGS.steps)

for step in range(ARGS.steps):  # the training loop
    x, y = draw(heard, roll)
    logits = model(x)
    loss = F.binary_cross_entropy_with_logits(logits, y.transpose(1, 2), pos_weight=rare)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses[step] = loss.detach()
    if ARGS.cuts:
        board.show(logits, y)
        score, cut = board.best
    if ARGS.journal:
        for cell, value in enumerate(logits.detach().flatten()[: ARGS.journal].tolist()):
            journal.debug("step %d frame %d key %d: %.3f", step, cell // 88, cell % 88, value)
    if ARGS.console and select.select([console], [], [], ARGS.console / 1000)[0]:
        break

if ARGS.events:
    recorder.stop()
for program in previews:
    program.terminate()
    program.wait()
if ARGS.chords:
    catalogue.closed.set()
    catalogue.join()
logging.shutdown()
operator.close()
console.close()
scratch.cleanup()
print(json.dumps({"first": losses[0].item(), "last": losses[-1].item(), "chords": len(catalogue.counts)}))
