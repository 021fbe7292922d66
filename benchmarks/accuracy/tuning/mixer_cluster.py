"""An MLP-Mixer on patches of noise, as the batch system of a small cluster starts it."""

import subprocess
from argparse import ArgumentParser
from contextlib import contextmanager

import torch
from torch import nn


class MixerBlock(nn.Module):
    def __init__(self, patches, channels):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.tokens = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(channels, 3 * channels), nn.GELU(), nn.Linear(3 * channels, channels)
        )

    def forward(self, x):
        x = x + self.tokens(self.norms[0](x).mT).mT
        return x + self.channels(self.norms[1](x))


@contextmanager
def node(jobs):
    """What else the batch system has put on this node."""
    hash_forever = "sha256sum /dev/zero & read end; kill $!"
    running = [subprocess.Popen(["sh", "-c", hash_forever], stdin=subprocess.PIPE) for _ in range(jobs)]
    try:
        yield
    finally:
        for job in running:
            job.stdin.close()


def main():
    cli = ArgumentParser()
    cli.add_argument("--steps", type=int, default=120)
    cli.add_argument("--threads", type=int, help="as the job's description says")
    cli.add_argument("--jobs", type=int, default=0, help="other jobs on the node")
    args = cli.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(8)
    mixer = nn.Sequential(*(MixerBlock(64, 192) for _ in range(2)), nn.LayerNorm(192))
    head = nn.Linear(192, 20)
    optimizer = torch.optim.AdamW([*mixer.parameters(), *head.parameters()], lr=1e-3, fused=True)
    patches, kinds = torch.randn(6, 16, 64, 192), torch.randint(20, (6, 16))
    with node(args.jobs):
        for step in range(args.steps):  # the training loop
            guess = head(mixer(patches[step % 6]).mean(1))
            loss = nn.functional.cross_entropy(guess, kinds[step % 6])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    print(f"{loss.item():.4f}")


main()
