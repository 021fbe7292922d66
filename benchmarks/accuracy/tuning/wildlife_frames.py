"""Names the animal in bursts of camera-trap frames: a small CNN for each frame, a GRU over the burst."""

import argparse
import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class CFG:
    side = 48
    frames = 5
    species = 12
    bursts = 336
    batch = 12
    hidden = 96
    lr = 2e-3
    weight_decay = 1e-4
    seed = 1337


ROWS, COLUMNS = np.ogrid[: CFG.side, : CFG.side]


def make_bursts(root, raw):
    """Writes what the cameras took: dark, noisy scenes through which something walks."""
    rng = np.random.default_rng(CFG.seed)
    labels = rng.integers(0, CFG.species, CFG.bursts)
    bursts = rng.integers(0, 90, (CFG.bursts, CFG.frames, 3, CFG.side, CFG.side), dtype=np.uint8)
    for burst, label in zip(bursts, labels.tolist(), strict=False):
        height, width = 8 + 2 * (label % 4), 8 + 3 * (label // 4)
        top, left = rng.integers(0, 22, 2).tolist()
        for number, frame in enumerate(burst):
            at = left + 3 * number
            frame[label % 3, top : top + height, at : at + width] = 100 + 10 * label
    np.save(root / "bursts.npy", bursts)
    np.save(root / "labels.npy", labels)
    if raw:
        for number, burst in enumerate(bursts):
            for at, frame in enumerate(burst):
                (root / f"{number:04d}_{at}.raw").write_bytes(frame.tobytes())


def read_block(path, number, size):
    with open(path, "rb") as file:
        file.seek(number * size)
        return file.read(size)


def read_frame(path, blocks):
    size = -(-3 * CFG.side**2 // blocks)
    data = b"".join(read_block(path, number, size) for number in range(blocks))
    return np.frombuffer(data, np.uint8).reshape(3, CFG.side, CFG.side)


def diffuse(frames, rounds, kappa=12.0, rate=0.2):
    """The smoothing of Perona and Malik, which leaves edges alone."""
    smooth = frames.astype(np.float32)
    for _ in range(rounds):
        flow = np.zeros_like(smooth)
        for axis in (-2, -1):
            for shift in (-1, 1):
                slope = np.roll(smooth, shift, axis) - smooth
                flow += slope / (1 + (slope / kappa) ** 2)
        smooth += rate * flow
    return smooth.clip(0, 255).astype(np.uint8)


def leaf_shadows(leaves, rng):
    """The shadows of leaves that sway from frame to frame."""
    shade = np.ones((CFG.frames, 1, CFG.side, CFG.side), np.float32)
    for _ in range(leaves):
        y, x = rng.uniform(0, CFG.side, 2)
        height, width = rng.uniform(3, 10, 2)
        for frame in shade:
            y, x = y + rng.normal(), x + rng.normal()
            inside = ((ROWS - y) / height) ** 2 + ((COLUMNS - x) / width) ** 2 < 1
            frame[0][inside] *= 0.6
    return shade


def augment(frames, leaves, rng):
    if rng.random() < 0.5:
        frames = frames[..., ::-1]
    frames = np.roll(frames, rng.integers(-4, 5, 2).tolist(), axis=(-2, -1))
    light = leaf_shadows(leaves, rng) * np.float32(rng.uniform(0.8, 1.2))
    return np.clip(frames * light, 0, 255).astype(np.uint8)


class BurstDataset(Dataset):
    def __init__(self, root, blocks=0, rounds=0, leaves=0):
        self.root, self.rng = root, None
        self.blocks, self.rounds, self.leaves = blocks, rounds, leaves
        self.bursts = np.load(root / "bursts.npy", mmap_mode="r")
        self.labels = np.load(root / "labels.npy").tolist()

    def __len__(self):
        return len(self.labels)

    def read(self, number):
        if not self.blocks:
            return np.array(self.bursts[number])
        paths = [self.root / f"{number:04d}_{at}.raw" for at in range(CFG.frames)]
        return np.stack([read_frame(path, self.blocks) for path in paths])

    def __getitem__(self, number):
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed())
        frames = self.read(number)
        if self.rounds:
            frames = diffuse(frames, self.rounds)
        frames = augment(frames, self.leaves, self.rng)
        return torch.from_numpy(frames), self.labels[number]


def block(inputs, outputs, stride):
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        nn.init.normal_(self.conv.weight, std=0.02)

    def forward(self, x):
        return x + self.conv(F.relu(self.norm(x)))


class Scene(nn.Module):
    """Tells habitats apart; its weights come from elsewhere and stay as they are."""

    def __init__(self, depth, width=32):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 4, padding=2)
        self.body = nn.Sequential(*[Residual(width) for _ in range(depth)])

    def forward(self, x):
        x = self.body(self.patches(x)).mean((2, 3))
        return F.layer_norm(x, x.shape[1:])


class TrapNet(nn.Module):
    def __init__(self, prototypes=0, checkpoints=0, scene=0):
        super().__init__()
        self.stem = block(3, 16, 2)
        self.blocks = nn.ModuleList([block(16, 32, 2), block(32, 64, 2), block(64, 64, 1)])
        self.levels = [(checkpoints + 2 - number) // 3 for number in range(3)]
        self.scene = Scene(scene) if scene else None
        self.gru = nn.GRU(96 if scene else 64, CFG.hidden, batch_first=True)
        self.prototypes = nn.Parameter(torch.randn(prototypes, CFG.hidden)) if prototypes else None
        self.head = nn.Linear(CFG.hidden + prototypes, CFG.species)

    def encode(self, images):
        x = self.stem(images)
        for stage, levels in zip(self.blocks, self.levels, strict=False):
            for _ in range(levels):
                stage = functools.partial(checkpoint, stage, use_reentrant=True)
            x = stage(x)
        return x.mean((2, 3))

    def distances(self, bursts):
        rows = []
        for burst in bursts:
            rows.append(torch.stack([(burst - prototype).pow(2).mean() for prototype in self.prototypes]))
        return torch.stack(rows)

    def forward(self, clips):
        amount, frames = clips.shape[:2]
        images = clips.flatten(0, 1).float() / 255 - 0.3
        features = self.encode(images).view(amount, frames, -1)
        if self.scene is not None:
            scene = self.scene(images.view(clips.shape)[:, frames // 2])
            features = torch.cat([features, scene[:, None].expand(-1, frames, -1)], 2)
        burst = self.gru(features)[0].mean(1)
        if self.prototypes is not None:
            burst = torch.cat([burst, self.distances(burst)], 1)
        return self.head(burst)


def endless(loader):
    while True:
        yield from loader


def train(args, root):
    dataset = BurstDataset(root, args.blocks, args.rounds, args.leaves)
    several = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    loader = DataLoader(dataset, CFG.batch, shuffle=True, drop_last=True, **several)
    model = TrapNet(args.prototypes, args.checkpoints, args.scene)
    if model.scene is not None:
        model.scene.eval()
        model.scene.requires_grad_(args.unfrozen)
    learned = [parameter for name, parameter in model.named_parameters() if not name.startswith("scene.")]
    optimizer = torch.optim.AdamW(learned, lr=CFG.lr, weight_decay=CFG.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    total = torch.zeros(())
    numbers = range(1, args.steps + 1)
    for step, (clips, labels) in zip(numbers, endless(loader), strict=False):  # the training loop
        loss = F.cross_entropy(model(clips), labels, label_smoothing=0.05)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {total.item() / 50:.4f}")
            total.zero_()
    torch.save(model.state_dict(), root / "trap_net.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--leaves", type=int, default=1, help="shadows of leaves in each burst")
    parser.add_argument("--blocks", type=int, default=0, help="read the raw frames, in so many blocks each")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of diffusion against noise")
    parser.add_argument("--prototypes", type=int, default=0, help="learned typical bursts")
    parser.add_argument("--checkpoints", type=int, default=0, help="checkpoints over the three blocks")
    parser.add_argument("--scene", type=int, default=0, help="depth of the habitat network")
    parser.add_argument("--unfrozen", action="store_true", help="take the habitat network as loaded")
    args = parser.parse_args()
    torch.manual_seed(CFG.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_bursts(Path(folder), raw=args.blocks > 0)
        train(args, Path(folder))


if __name__ == "__main__":
    main()
