# %% [markdown]
# Sharpening photographs of bark. The camera (lens, sensor, binning) is simulated at full resolution by a
# thread of its own, a few batches ahead; numpy and torch both let go of the interpreter while they compute.

# %%
import argparse
import queue
import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

FULL, BIN = 256, 4
BATCH, AHEAD = 8, 4


# %% Photographs: filtered noise, with ridges
def bark(count, rng):
    rows, columns = np.fft.fftfreq(FULL)[:, None], np.fft.rfftfreq(FULL)
    power = np.exp(-12 * np.abs(rows)) / (0.02 + columns) * (1 + 20 * (np.abs(columns - 0.07) < 0.01))
    noise = np.fft.rfft2(rng.standard_normal((count, FULL, FULL), dtype=np.float32))
    pictures = np.fft.irfft2(noise * power.astype(np.float32))
    return ((pictures - pictures.mean()) / pictures.std()).astype(np.float32)


# %% The camera
def binned(x):
    return x.reshape(len(x), FULL // BIN, BIN, FULL // BIN, BIN).mean((2, 4))


class Camera:
    def __init__(self, pictures, seed):
        self.pictures = pictures
        self.rng = np.random.default_rng(seed)
        self.rows, self.columns = np.fft.fftfreq(FULL)[:, None], np.fft.rfftfreq(FULL)

    def lens(self):
        """The transfer function of a lens out of focus, of which each shot has another."""
        wide, high = self.rng.uniform(60, 400, (2, BATCH, 1, 1))
        return np.exp(-wide * self.columns**2 - high * self.rows**2).astype(np.float32)

    def shoot(self):
        sharp = self.pictures[self.rng.choice(len(self.pictures), BATCH, replace=False)]
        sharp = np.roll(sharp, self.rng.integers(FULL, size=2), axis=(1, 2))
        seen = np.fft.irfft2(np.fft.rfft2(sharp) * self.lens())
        seen = seen + 0.1 * self.rng.standard_normal(seen.shape, dtype=np.float32)
        seen, sharp = binned(seen.astype(np.float32)), binned(sharp)
        return torch.from_numpy(seen).unsqueeze(1), torch.from_numpy(sharp).unsqueeze(1)


def film(camera, shots, reel):
    for _ in range(shots):
        reel.put(camera.shoot())
    reel.put(None)


# %% The network
class Sharpener(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        double = 2 * width
        self.enter = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.Conv2d(width, double, 2, 2), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(
            nn.Conv2d(double, double, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(double, double, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(double, 4 * width, 1),
            nn.PixelShuffle(2),
        )
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, seen):
        wide = self.enter(seen)
        return seen + self.leave(wide + self.deep(self.down(wide)))


# %% Training
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(2)
    torch.set_num_threads(1)  # one CPU for the network, one for the camera
    camera = Camera(bark(96, np.random.default_rng(1)), seed=6)
    reel = queue.Queue(maxsize=AHEAD)
    threading.Thread(target=film, args=(camera, steps, reel), name="camera", daemon=True).start()

    net = Sharpener()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    total = torch.zeros(())
    while (shot := reel.get()) is not None:  # the training loop
        seen, sharp = shot
        loss = F.l1_loss(net(seen), sharp)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    print(f"mean error {total.item() / steps:.3f}")


# %%
if __name__ == "__main__":
    main()
