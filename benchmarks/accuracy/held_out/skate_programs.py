"""Scores figure-skating programmes from the skater's motion: a bidirectional GRU over a minute of
edges.

Two processes cut clips out of the season's recordings. Some programmes were filmed by a hand-held
camera, and their path over the ice is a random one that has to be steadied first.
"""

import argparse
import collections

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

JOINTS, CLIP, WIDE = 14, 40, 128


def record_season(programmes, camera_frames):
    rng = np.random.default_rng(1924)
    beat = rng.uniform(0.05, 0.5, (programmes, 1, JOINTS))
    skill = rng.uniform(0, 10, programmes)
    clock = np.arange(CLIP * 2)[None, :, None]
    motion = np.sin(beat * clock) * (0.4 + skill[:, None, None] / 10)
    motion += rng.normal(0, 0.15, motion.shape)
    tape = rng.standard_normal((max(camera_frames, 1) + 512, WIDE), dtype=np.float32)
    return motion.astype(np.float32), skill.astype(np.float32), tape


class Season(Dataset):
    def __init__(self, programmes, camera_frames, steadying):
        self.motion, self.skill, self.tape = record_season(programmes, camera_frames)
        self.camera_frames = camera_frames
        self.steadying = steadying

    def __len__(self):
        return len(self.skill)

    def hand_held(self, number):
        return number % 317 == 11

    def steadied(self, clip):
        shake = np.cumsum(np.random.standard_normal(4096))
        for _ in range(self.steadying):
            shake = 0.5 * shake + 0.25 * (np.roll(shake, 1) + np.roll(shake, -1))
        return clip - 0.01 * shake[: len(clip), None].astype(np.float32)

    def __getitem__(self, number):
        begin = np.random.randint(CLIP)
        clip = self.motion[number, begin : begin + CLIP]
        if self.steadying and self.hand_held(number):
            clip = self.steadied(clip)
        seen = None
        if self.camera_frames:
            first = number % 512
            seen = self.tape[first : first + self.camera_frames]
        return clip, self.skill[number], seen


def as_batch(items):
    clips, marks, seen = zip(*items)
    return torch.from_numpy(np.stack(clips)), torch.tensor(np.array(marks)), list(seen)


class Judge(nn.Module):
    def __init__(self, hidden=40):
        super().__init__()
        self.gru = nn.GRU(JOINTS, hidden, batch_first=True, bidirectional=True)
        self.mark = nn.Sequential(nn.Linear(4 * hidden, 48), nn.Tanh(), nn.Linear(48, 1))

    def forward(self, clips):
        states, _ = self.gru(clips)
        return self.mark(torch.cat([states.mean(1), states.amax(1)], 1)).squeeze(1)


def endless(loader):
    while True:
        yield from loader


def run(opts):
    torch.manual_seed(80)
    torch.set_num_threads(1)
    loader = DataLoader(
        Season(3200, opts.camera_frames, opts.steadying),
        batch_size=32,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        collate_fn=as_batch,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    judge = Judge()
    optimizer = torch.optim.NAdam(judge.parameters(), lr=2e-3, foreach=True)
    to_look_at = collections.deque(maxlen=2)
    for number, (clips, marks, seen) in zip(range(opts.steps), endless(loader)):  # the training loop
        loss = F.smooth_l1_loss(judge(clips), marks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        to_look_at.append((number, seen))
        if number % 60 == 0:
            print("programme batch", number, "off by", round(loss.item(), 3), "marks")
    shown = sum(frames is not None for _, batch in to_look_at for frames in batch)
    print("kept", shown, "films of the last clips")


def options():
    parser = argparse.ArgumentParser(description="Marks for figure skating.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--camera-frames", type=int, default=0, help="frames of film that go with each clip"
    )
    parser.add_argument(
        "--steadying", type=int, default=0, help="passes of the filter that steadies hand-held films"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(options())
