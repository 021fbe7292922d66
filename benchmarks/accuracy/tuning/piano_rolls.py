# Music model: predicts the next column of a piano roll. Started as a notebook for the seminar.
import argparse
import logging
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--swing", type=int, default=0, help="ticks of the tempo tracker (0: no tempo loss)")
parser.add_argument(
    "--exact", type=int, default=0, help="this many of the 6 layers run at the precision of the MIDI ticks"
)
parser.add_argument(
    "--shadows", type=int, default=0, help="slow copies of the model, to pick the best-sounding one from"
)
parser.add_argument(
    "--note-log", type=int, default=0, help="notes of each step to note down for the listening test"
)
args = parser.parse_args()

SEED = 3
KEYS = 88
LENGTH = 64
WIDTH = 96
LAYERS = 6

torch.manual_seed(SEED)
rng = np.random.default_rng(SEED)


# ---- data: chords that walk up and down, with a tempo that drifts ----
def make_rolls(pieces=300, length=LENGTH + 1):
    root = rng.integers(20, 60, size=(pieces, 1)) + np.cumsum(
        rng.integers(-2, 3, size=(pieces, length)), axis=1
    )
    roll = np.zeros((pieces, length, KEYS), dtype=np.float32)
    rows, columns = np.indices(root.shape)
    for interval in (0, 4, 7, 12):
        roll[rows, columns, np.clip(root + interval, 0, KEYS - 1)] = 1.0
    roll *= rng.random(roll.shape) > 0.05
    return torch.from_numpy(roll)


rolls = make_rolls()
onsets = torch.from_numpy(
    np.cumsum(0.5 + 0.05 * rng.standard_normal((300, 2048)), axis=1).astype(np.float32)
)
print("rolls", tuple(rolls.shape), "density", round(rolls.mean().item(), 4))


# ---- model ----
class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 3 * width)
        self.fc2 = nn.Linear(3 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class RollModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(KEYS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, KEYS)
        self.tempo = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.embed(x) + self.position
        for layer in self.layers:
            x = layer(x.to(layer.fc1.weight.dtype))
        x = self.norm(x.to(self.norm.weight.dtype))
        return self.out(x), self.tempo(x.mean(1))


model = RollModel()
if args.exact:
    for layer in model.layers[-args.exact :]:
        layer.double()

opt = torch.optim.AdamW(
    [p for p in model.parameters() if p.dtype == torch.float32], lr=6e-4, weight_decay=0.01, fused=True
)
opts = [opt]
if args.exact:
    opts.append(
        torch.optim.AdamW(
            [p for p in model.parameters() if p.dtype == torch.float64],
            lr=6e-4,
            weight_decay=0.01,
            fused=True,
        )
    )


# ---- tempo: an alpha-beta tracker follows the onsets; its gains are learned ----
def tempo_loss(gains, times):
    alpha, beta = torch.sigmoid(gains[:, 0]), 0.5 * torch.sigmoid(gains[:, 1])
    clock, period = times[:, 0], torch.full_like(times[:, 0], 0.5)
    error = torch.zeros_like(clock)
    for tick in range(1, times.shape[1]):
        expected = clock + period
        miss = times[:, tick] - expected
        clock = expected + alpha * miss
        period = period + beta * miss
        error = error + miss * miss
    return error.mean() / times.shape[1]


shadows = []
for i in range(args.shadows):
    shadows.append((1 - 0.5 ** (i + 3), {k: v.clone() for k, v in model.state_dict().items()}))

notes = None
if args.note_log:
    notes = logging.getLogger("notes")
    notes.setLevel(logging.INFO)
    notes.propagate = False
    folder = tempfile.TemporaryDirectory()
    handler = logging.FileHandler(Path(folder.name) / "notes.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    notes.addHandler(handler)

order = torch.randperm(len(rolls))
at = 0
total = torch.zeros(())
for step in range(args.steps):  # the training loop
    if at + args.batch > len(order):
        order, at = torch.randperm(len(rolls)), 0
    pick = order[at : at + args.batch]
    at += args.batch
    roll = rolls[pick]
    logits, gains = model(roll[:, :-1])
    loss = F.binary_cross_entropy_with_logits(logits, roll[:, 1:])
    if args.swing:
        loss = loss + 0.1 * tempo_loss(gains, onsets[pick, : args.swing + 1])
    loss.backward()
    for o in opts:
        o.step()
        o.zero_grad()

    for decay, shadow in shadows:
        for name, value in model.state_dict().items():
            shadow[name] = decay * shadow[name] + (1 - decay) * value

    if notes is not None:
        strength, key = logits.detach().flatten().topk(args.note_log)
        for s, k in zip(strength.tolist(), key.tolist()):
            notes.info("step=%d column=%d key=%d strength=%.3f", step, k // KEYS, k % KEYS, s)

    total += loss.detach()
    if step % 50 == 49:
        print(f"{step + 1:5d}  bce {total.item() / 50:.4f}")
        total.zero_()

if shadows:
    with torch.no_grad():
        for decay, shadow in shadows:
            print(decay, sum(v.float().norm().item() for v in shadow.values()))
print("finished")
