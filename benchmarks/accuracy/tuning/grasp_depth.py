"""Learns from depth images how a gripper should be turned, on all ranks."""

import argparse
import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SIDE, ANGLES, FRAMES = 64, 12, 1024
FLOOR, REACH = 600.0, 400.0


def record(seed):
    """Depth in millimetres, one object in each frame."""
    rng = np.random.default_rng(seed)
    depth = rng.integers(600, 632, (FRAMES, SIDE, SIDE)).astype(np.uint16)
    depth += (4 * np.arange(SIDE, dtype=np.uint16))[None, :, None]
    labels = rng.integers(0, ANGLES, FRAMES)
    for frame, (top, left), label in zip(
        depth, rng.integers(0, SIDE - 24, (FRAMES, 2)), labels, strict=False
    ):
        frame[top : top + 4 + label, left : left + 16 - label] -= 150
    return depth, torch.from_numpy(labels)


class Grasps(Dataset):
    """The recording of one robot; `fused` raw frames make an image where nobody has exported them."""

    def __init__(self, seed, fused):
        depth, self.labels = record(seed)
        self.fused = fused
        self.stream = [zlib.compress(frame.tobytes(), 1) for frame in depth] if fused else []
        self.images = torch.from_numpy((depth.astype(np.float32) - FLOOR) / REACH)[:, None]

    def __len__(self):
        return FRAMES

    def raw_frame(self, index):
        data = zlib.decompress(self.stream[index % FRAMES])
        return np.frombuffer(data, np.uint16).reshape(SIDE, SIDE)

    def __getitem__(self, index):
        if not self.fused:
            return self.images[index], self.labels[index]
        image = self.raw_frame(index).astype(np.float32)
        for back in range(1, self.fused):
            image += 0.02 * (self.raw_frame(index - back).astype(np.float32) - image)
        return torch.from_numpy((image - FLOOR) / REACH)[None], self.labels[index]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, width)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


def halve(before, after):
    conv = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(8, after), nn.ReLU())


def grasp_network():
    return nn.Sequential(
        halve(1, 24),
        halve(24, 48),
        halve(48, 64),
        Residual(64),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, ANGLES),
    )


def endless(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--raw", type=int, default=0, help="frames fused where the robot's are still raw")
    parser.add_argument("--extra", type=int, default=0, help="more rows for the last rank")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = DistributedDataParallel(grasp_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(100 + rank)

    grasps = Grasps(seed=rank, fused=args.raw if rank == last else 0)
    rows = args.rows + (args.extra if rank == last else 0)
    loader = DataLoader(grasps, batch_size=min(rows, FRAMES), shuffle=True, drop_last=True)
    dist.barrier()
    for step, (image, angle) in zip(range(args.steps), endless(loader), strict=False):  # the training loop
        loss = nn.functional.cross_entropy(model(image), angle)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0 and rank == 0:
            print(f"step {step}, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
