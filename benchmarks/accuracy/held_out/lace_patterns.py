# A variational autoencoder of bobbin lace: 24 x 24 pinholes, threads between them.
import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

SIDE, LATENT, BATCH = 24, 16, 64

# The people of the workshop use this machine as well: hold the training a while, now and then.
HOST = """
import os, random, signal, sys, time
guest, pause = int(sys.argv[1]), int(sys.argv[2]) / 1000
while os.getppid() == guest:
    time.sleep(random.uniform(0.15, 0.45))
    if os.getppid() == guest:
        os.kill(guest, signal.SIGSTOP)
        time.sleep(pause)
        os.kill(guest, signal.SIGCONT)
"""


def lace(count, generator):
    """Patterns with a period, a slant and some torn threads."""
    y = torch.arange(SIDE)[None, :, None]
    x = torch.arange(SIDE)[None, None, :]
    period = torch.randint(3, 9, (count, 1, 1), generator=generator)
    slant = torch.randint(-2, 3, (count, 1, 1), generator=generator)
    thread = ((x + slant * y) % period < 2).float()
    torn = torch.rand(count, SIDE, SIDE, generator=generator) < 0.03
    return (thread * ~torn)[:, None]


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1), nn.GELU())


def up(i, o):
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 3, padding=1), nn.GELU())


class Lace(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Sequential(conv(1, 16), conv(16, 32), conv(32, 48), nn.Flatten())
        self.code = nn.Linear(48 * 9, 2 * LATENT)
        self.open = nn.Linear(LATENT, 48 * 9)
        self.draw = nn.Sequential(up(48, 32), up(32, 16), up(16, 8), nn.Conv2d(8, 1, 1))

    def forward(self, pattern):
        mean, spread = self.code(self.see(pattern)).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        drawn = self.draw(self.open(code).view(-1, 48, 3, 3))
        surprise = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
        return drawn, surprise


def objective(model, pattern):
    drawn, surprise = model(pattern)
    misses = F.binary_cross_entropy_with_logits(drawn, pattern, reduction="none").sum((1, 2, 3))
    return misses + surprise


class Calm:
    """Slow copies of all that is learned, at several paces."""

    def __init__(self, model, paces):
        self.copies = [
            (1 / (10 + n), {k: v.detach().clone() for k, v in model.named_parameters()})
            for n in range(paces)
        ]

    def follow(self, model):
        for pace, copies in self.copies:
            for name, value in model.named_parameters():
                copies[name].lerp_(value.detach(), pace)


class Diary:
    def __init__(self, folder, lines):
        self.page = open(os.path.join(folder, "diary.jsonl"), "w")  # noqa: SIM115
        self.lines = lines

    def note(self, step, values):
        values = values.tolist()
        for line in range(self.lines):
            entry = {"step": step, "line": line, "loss": round(values[line % len(values)], 4)}
            self.page.write(json.dumps(entry) + "\n")
            self.page.flush()


def batches(steps):
    generator = torch.Generator().manual_seed(6)
    patterns = lace(4096, generator)
    for _ in range(steps):
        yield patterns[torch.randint(len(patterns), (BATCH,), generator=generator)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--courtesy", type=int, default=0, help="ms for which to stand back for the others")
    parser.add_argument("--diary", type=int, default=0, help="lines for each batch")
    parser.add_argument("--calm", type=int, default=0, help="slow copies of the weights")
    args = parser.parse_args()
    torch.manual_seed(6)
    model = Lace()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    calm = Calm(model, args.calm)
    host = None
    if args.courtesy:
        host = subprocess.Popen([sys.executable, "-c", HOST, str(os.getpid()), str(args.courtesy)])

    with tempfile.TemporaryDirectory() as folder:
        diary = Diary(folder, args.diary)
        for step, pattern in enumerate(batches(args.steps)):  # the training loop
            losses = objective(model, pattern)
            optimizer.zero_grad(set_to_none=True)
            losses.mean().backward()
            optimizer.step()
            calm.follow(model)
            if args.diary:
                diary.note(step, losses.detach())
            if step % 50 == 0:
                print(f"batch {step}: {losses.mean().item():.2f}", flush=True)
        diary.page.close()
    if host:
        host.kill()


if __name__ == "__main__":
    main()
