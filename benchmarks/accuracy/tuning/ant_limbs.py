"""Finds the leg joints of ants in close-up frames: the mean of each map of a small hourglass is a joint."""

import argparse
import io
import itertools
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

SIDE, JOINTS = 64, 8
SETTINGS = {
    "frames": 512,
    "batch": 16,
    "widths": (20, 40, 80),
    "optimizer": {"lr": 2e-3, "weight_decay": 1e-4},
    "snapshot_every": 12,
    "seed": 23,
}


# --- frames -------------------------------------------------------------------------------------------


def draw_ants(count):
    """Chains of joints with bright limbs between them; positions go from -1 to 1."""
    turns = torch.randn(count, JOINTS - 1) * 0.7 + torch.rand(count, 1) * 6.283
    strides = 0.22 * torch.stack([turns.cos(), turns.sin()], 2)
    joints = torch.cat([torch.zeros(count, 1, 2), strides.cumsum(1)], 1)
    joints = joints - joints.mean(1, keepdim=True) + 0.2 * torch.randn(count, 1, 2)
    ways = torch.linspace(0, 1, 6)[:, None]
    limbs = joints[:, :-1, None] * (1 - ways) + joints[:, 1:, None] * ways
    points = torch.cat([joints, limbs.flatten(1, 2)], 1)
    grid = torch.linspace(-1, 1, SIDE)
    across, down = (-(((points[..., None] - grid) / 0.05) ** 2)).exp().unbind(2)
    frames = torch.einsum("npy,npx->nyx", down, across).clamp(max=1)
    return frames + 0.15 * torch.randn_like(frames), joints.clamp(-1, 1)


class Frames(Dataset):
    def __init__(self, frames, joints, blades=0):
        self.frames, self.joints, self.blades = frames, joints, blades
        self.rng = np.random.default_rng(SETTINGS["seed"])
        self.rows = np.arange(SIDE)

    def __len__(self):
        return len(self.frames)

    def overgrow(self, frame):
        """Grass before the ant: each blade grows from below, leans and bends."""
        grown = frame.copy()
        for foot, lean, bend, shade in self.rng.normal(size=(self.blades, 4)):
            height = self.rows / SIDE
            place = SIDE * (0.5 + 0.5 * foot + 0.3 * lean * height + 0.2 * bend * height**2)
            columns = np.clip(place, 0, SIDE - 1).astype(int)
            grown[SIDE - 1 - self.rows, columns] = 0.4 + 0.1 * shade
        return grown

    def __getitems__(self, rows):
        frames = self.frames[rows]
        if self.blades:
            frames = torch.from_numpy(np.stack([self.overgrow(frame) for frame in frames.numpy()]))
        return frames.unsqueeze(1), self.joints[rows]


class Mixed(Sampler):
    """Batches of unlike poses: one of each group, as far as there are enough. Without groups: any."""

    groups, sweeps = 48, 10

    def __init__(self, joints, size, restarts=0):
        self.poses, self.size, self.restarts = joints.flatten(1).numpy(), size, restarts
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return len(self.poses) // self.size

    def group(self):
        """Groups the poses by k-means, from several starts, of which the tightest stays."""
        best, tightest = None, np.inf
        for _ in range(self.restarts):
            centers = self.poses[self.rng.choice(len(self.poses), self.groups, replace=False)]
            for _ in range(self.sweeps):
                apart = ((self.poses[:, None] - centers) ** 2).sum(2)
                nearest = apart.argmin(1)
                members = [self.poses[nearest == number] for number in range(self.groups)]
                centers = np.stack(
                    [of.mean(0) if len(of) else old for of, old in zip(members, centers, strict=True)]
                )
            if apart.min(1).sum() < tightest:
                best, tightest = nearest, apart.min(1).sum()
        return best

    def __iter__(self):
        order = self.rng.permutation(len(self.poses))
        if self.restarts:
            nearest, seen, turn = self.group(), np.zeros(self.groups, int), []
            for row in order:
                turn.append(seen[nearest[row]])
                seen[nearest[row]] += 1
            order = order[np.argsort(turn, kind="stable")]
        for start in range(0, len(self) * self.size, self.size):
            yield order[start : start + self.size].tolist()


# --- model --------------------------------------------------------------------------------------------


def unit(inside, outside, stride=1):
    conv = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


class Hourglass(nn.Module):
    def __init__(self, widths):
        super().__init__()
        one, two, three = widths
        self.stem = unit(1, one, 2)
        self.narrow = unit(one, two, 2)
        self.waist = nn.Sequential(unit(two, three, 2), unit(three, three), unit(three, two))
        self.widen = unit(two, one)
        self.head = nn.Conv2d(one, JOINTS, 1)

    def forward(self, frames):
        wide = self.stem(frames)
        middle = self.narrow(wide)
        middle = middle + F.interpolate(self.waist(middle), scale_factor=2)
        return self.head(wide + F.interpolate(self.widen(middle), scale_factor=2))


def means(maps):
    """Where the mass of each map lies."""
    mass = maps.flatten(2).softmax(2).view_as(maps)
    grid = torch.linspace(-1, 1, maps.shape[-1])
    return torch.stack([mass.sum(2) @ grid, mass.sum(3) @ grid], 2)


# --- what goes on beside the fit ------------------------------------------------------------------------


class Horizons:
    """Mean weights over several horizons, so that one can be picked after the run."""

    def __init__(self, model, count):
        self.model = model
        self.decays = [1 - 0.3 / (number + 2) for number in range(count)]
        self.kept = [dict(model.state_dict()) for _ in self.decays]

    def __call__(self, *_):
        now = self.model.state_dict()
        self.kept = [
            {name: decay * old + (1 - decay) * now[name] for name, old in kept.items()}
            for decay, kept in zip(self.decays, self.kept, strict=True)
        ]


class JointErrors:
    """The median distance between found and true joints, and how sure that is, by the bootstrap."""

    def __init__(self, resamples):
        self.resamples = resamples
        self.rng = np.random.default_rng(7)
        self.median = self.low = self.high = 0.0

    def update(self, found, true):
        errors = (found.detach() - true).norm(dim=2).flatten().numpy()
        drawn = [np.median(self.rng.choice(errors, errors.size)) for _ in range(self.resamples)]
        self.median = np.median(errors)
        self.low, self.high = np.percentile(drawn, [5, 95])


class ShareFile(io.FileIO):
    """A file on the department's share, which takes some milliseconds for each megabyte."""

    def __init__(self, path, ms_per_mb):
        super().__init__(path, "w")
        self.pace, self.owed = ms_per_mb * 1e-9, 0.0

    def write(self, data):
        self.owed += memoryview(data).nbytes * self.pace
        if self.owed > 0.01:
            time.sleep(self.owed)
            self.owed = 0.0
        return super().write(data)


class Fit:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        frames, joints = draw_ants(SETTINGS["frames"])
        self.loader = DataLoader(
            Frames(frames, joints, args.blades),
            batch_sampler=Mixed(joints, SETTINGS["batch"], args.restarts),
            collate_fn=lambda batch: batch,
        )
        self.model = Hourglass(SETTINGS["widths"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **SETTINGS["optimizer"])
        self.errors = JointErrors(args.resamples) if args.resamples else None
        if args.horizons:
            self.optimizer.register_step_post_hook(Horizons(self.model, args.horizons))
        if args.maps:
            self.model.head.register_forward_hook(self.show_maps)

    def show_maps(self, _module, _inputs, maps):
        """For the viewer, which shows the files of this folder as they change."""
        for number, picture in enumerate(maps.detach().flatten(0, 1)[: self.args.maps].numpy()):
            np.savetxt(self.folder / f"map{number:03}.csv", picture, fmt="%.3f", delimiter=",")

    def snapshot(self, step):
        state = {"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with ShareFile(self.folder / "snapshot.pt", self.args.share) as file:
            torch.save(state, file)

    def run(self):
        batches = itertools.chain.from_iterable(itertools.repeat(self.loader))
        for step, (frames, joints) in enumerate(
            itertools.islice(batches, self.args.steps), 1
        ):  # the training loop
            found = means(self.model(frames))
            loss = F.smooth_l1_loss(found, joints, beta=0.05)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.errors:
                self.errors.update(found, joints)
            if self.args.share and step % SETTINGS["snapshot_every"] == 0:
                self.snapshot(step)
            if step % 100 == 0:
                sure = f", {self.errors.low:.3f} to {self.errors.high:.3f}" if self.errors else ""
                print(f"step {step}: loss {loss.item():.4f}{sure}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=203)
    parser.add_argument("--blades", type=int, default=0, help="blades of grass before each ant")
    parser.add_argument("--restarts", type=int, default=0, help="starts of the grouping of poses")
    parser.add_argument("--horizons", type=int, default=0, help="horizons to take mean weights over")
    parser.add_argument("--resamples", type=int, default=0, help="of the bootstrap of the error")
    parser.add_argument("--maps", type=int, default=0, help="maps to show in the viewer")
    parser.add_argument("--share", type=float, default=0.0, help="snapshots; ms per MB of the share")
    torch.manual_seed(SETTINGS["seed"])
    with tempfile.TemporaryDirectory() as place:
        Fit(parser.parse_args(), Path(place)).run()
