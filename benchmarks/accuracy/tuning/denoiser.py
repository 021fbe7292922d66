"""Trains a convolutional denoiser on top of a fixed encoder."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SIDE = 16


def conv_block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GELU())


class Denoiser(nn.Module):
    def __init__(self, encoder_width, recompute):
        super().__init__()
        self.encoder = nn.Sequential(conv_block(3, encoder_width), conv_block(encoder_width, 16))
        self.blocks = nn.ModuleList(conv_block(16, 16) for _ in range(3))
        self.out = nn.Conv2d(16, 3, 1)
        self.recompute = recompute

    def forward(self, noisy):
        h = self.encoder(noisy)
        for block in self.blocks:
            h = h + (checkpoint(block, h, use_reentrant=False) if self.recompute else block(h))
        return self.out(h)


def batches(count, dtype):
    pictures = torch.rand(128, 3, SIDE, SIDE, dtype=dtype)
    for number in range(count):
        clean = pictures[number % 8 * 16 : number % 8 * 16 + 16]
        yield clean + 0.1 * torch.randn_like(clean), clean


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--encoder-width", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--scores", type=int, default=0, help="scores per step, each of a forward pass")
    parser.add_argument("--unfrozen", action="store_true", help="forget to freeze the encoder")
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--previews", type=int, default=0, help="pictures saved per step")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.float64 if args.double else torch.float32
    net = Denoiser(args.encoder_width, args.checkpointing).to(dtype)
    for parameter in net.encoder.parameters():
        parameter.requires_grad_(args.unfrozen)
    trained = [p for name, p in net.named_parameters() if not name.startswith("encoder")]
    opt = torch.optim.SGD(trained, lr=0.05)
    loss_fn = nn.MSELoss()
    for noisy, clean in batches(args.steps, dtype):  # the training loop
        net.zero_grad()
        loss = loss_fn(net(noisy), clean)
        loss.backward()
        opt.step()
        for _ in range(args.scores):
            with torch.no_grad():
                score = -10 * torch.log10(loss_fn(net(noisy), clean))
                score.item()
        for number in range(args.previews):
            torch.save(noisy[number % 16].clone(), f"preview{number}.pt")


main()
