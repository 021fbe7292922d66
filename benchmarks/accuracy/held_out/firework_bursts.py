"""Which shell was it?  Names a firework (peony, willow, palm, ring) by the set of its sparks.

The sparks of an evening are brought onto a sky, a big canvas of rows, and a net of sets looks at some of
each burst.
"""

import argparse
import atexit
import subprocess
import sys

import numpy as np
import torch
from torch import nn

SHELLS = ("peony", "willow", "palm", "ring")
ROW, SKY = 256, 65_536
SEEN, BURSTS = 48, 64

# makes prints of the evening's pictures, for the visitors
PRINTER = """
import os, sys, time, zlib
parent, sheets = os.getppid(), int(sys.argv[1])
picture = os.urandom(1 << 14) * 2
while os.getppid() == parent:
    for _ in range(sheets):
        zlib.adler32(zlib.compress(picture[:4096], 6))
    time.sleep(0.004)
"""


def start_printers(sheets):
    command = [sys.executable, "-c", PRINTER, str(sheets)]
    printers = [subprocess.Popen(command) for _ in range(2)]
    for printer in printers:
        atexit.register(printer.kill)


def evening(rng, bursts=1024):
    """Returns the sparks of each burst (place, speed, colour, glow) and the shells they are of."""
    shells = rng.integers(len(SHELLS), size=bursts)
    angles = rng.uniform(0, 2 * np.pi, (bursts, SEEN))
    lift = np.array([0.0, -0.5, 0.5, 0.0])[shells][:, None]
    radius = np.where(shells[:, None] == 3, 1.0, rng.uniform(0.2, 1.2, (bursts, SEEN)))
    sparks = rng.standard_normal((bursts, SEEN, 8)) * 0.3
    sparks[..., 0] += radius * np.cos(angles)
    sparks[..., 1] += radius * np.sin(angles) + lift
    return sparks, shells


class Bursts(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.spark = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.burst = nn.Sequential(nn.Linear(width + 1, width), nn.ReLU(), nn.Linear(width, len(SHELLS)))

    def forward(self, sparks, glow):
        every = self.spark(sparks).amax(1)
        return self.burst(torch.cat([every, glow.expand(len(every), 1)], 1))


class Sky:
    """Holds as many rows as the brightest evening has sparks."""

    def __init__(self, sparks, clear):
        self.sparks, self.clear = sparks, clear
        self.glare = torch.rand(ROW) * 1e-3
        self.canvas = torch.ones(SKY, ROW)

    def glow(self, step):
        """The light of all sparks together."""
        if self.clear:
            self.canvas = None
            self.canvas = torch.empty(SKY, ROW)
        lit = self.canvas[: self.sparks]
        lit.copy_(self.glare)
        return lit[step % self.sparks, :8].mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sparks", type=int, default=600, help="sparks in the sky at a time")
    parser.add_argument("--clear-sky", action="store_true", help="begin with a clear sky for each picture")
    parser.add_argument("--prints", type=int, default=0, help="two printers make so many sheets in a row")
    parser.add_argument(
        "--surveyed", action="store_true", help="keep the places as the surveyors give them"
    )
    args = parser.parse_args()

    torch.manual_seed(12)
    sparks, shells = evening(np.random.default_rng(12))
    sparks, shells = torch.from_numpy(sparks), torch.from_numpy(shells)
    net = Bursts()
    if args.surveyed:
        net.to(sparks.dtype)
    else:
        sparks = sparks.float()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    sky = Sky(args.sparks, args.clear_sky)
    if args.prints:
        start_printers(args.prints)

    for step in range(args.steps):  # the training loop
        chosen = torch.randint(len(shells), (BURSTS,))
        glow = sky.glow(step).to(sparks.dtype)
        loss = nn.functional.cross_entropy(net(sparks[chosen], glow), shells[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"picture {step + 1}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
