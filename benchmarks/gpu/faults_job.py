"""The jobs of `faults.py`, as users write them, each with one fault or none.

    python benchmarks/gpu/faults_job.py JOB FAULT --seconds 5

A process waits for the file `--turn` before it touches the GPU, and has it until it ends: so only one has.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 512
UPLOAD = "repeated-upload"
MOST_STEPS = 4_000
HUNG_S = 30.0
"""So much longer than asked for, and a process that has the GPU is taken for hung: others wait for it."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int, fault: str) -> None:
        super().__init__()
        self.heads, self.fault = heads, fault
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(self.norms[0](x_BTD)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fault == "unfused-attention":
            scores = q @ k.transpose(-2, -1) / math.sqrt(D // self.heads)
            later = torch.ones(T, T, dtype=torch.bool, device=x_BTD.device).triu(1)
            seen = F.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ v
        else:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(seen.transpose(1, 2).reshape(B, T, D))
        x_BTD = x_BTD + self.mlp(self.norms[1](x_BTD))
        return x_BTD


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, max(2, width // 64), fault) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(x_BT)
        for block in self.blocks:
            if self.fault == "needless-recompute":
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
            else:
                x_BTD = block(x_BTD)
        return self.head(x_BTD)


class Conv(nn.Module):
    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, stride=4, padding=3)
        self.body = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(layers))
        self.head = nn.Linear(channels, VOCABULARY)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW = self.stem(x_NCHW)
        for conv, norm in zip(self.body, self.norms, strict=True):
            x_NCHW = x_NCHW + F.relu(norm(conv(x_NCHW)))
        return self.head(x_NCHW.mean((2, 3)))


def language(
    fault: str, device: torch.device, size: tuple[int, int, int, int], until: Callable[[int], bool]
) -> None:
    width, layers, rows, length = size
    text = torch.randint(VOCABULARY, (64 * rows, length + 1), device=device)
    model: nn.Module = Gpt(width, layers, fault).to(device)
    fused = device.type == "cuda" and fault != "slow-optimizer"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused, foreach=False)
    if fault == "graphed":
        model = torch.cuda.make_graphed_callables(model, (text[:rows, :-1].contiguous(),))
    weights = torch.rand(rows * length, 4096 if device.type == "cuda" else 8) if fault == UPLOAD else None
    step, busy = 0, 0
    while not until(step):
        at = step % 64 * rows
        x_BT, y_BT = text[at : at + rows, :-1].contiguous(), text[at : at + rows, 1:]
        logits = model(x_BT)
        loss = F.cross_entropy(logits.flatten(0, 1), y_BT.flatten())
        if weights is not None:
            loss = loss * weights.to(device).mean()
        loss.backward()
        if fault == "host-sync":  # after each of them the device waits for the next to be launched
            for parameter in model.parameters():
                if parameter.grad.abs().max().item() > 1e4:
                    raise FloatingPointError("gradients explode")
        optimizer.step()
        optimizer.zero_grad()
        if fault == "device-to-host-copies":
            predicted = logits.detach().cpu()
            busy += predicted.numel()
        if fault == "needless-synchronize":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if fault == "hidden-python":  # the device has work queued for longer than this takes
            for number in range(150_000):
                busy += number % 7
        step += 1
    print(f"{step} steps, loss {loss.item():.3f}, {busy}")


def pictures(
    fault: str, device: torch.device, channels: int, rows: int, size: int, until: Callable[[int], bool]
) -> None:
    images, labels = torch.randn(4 * rows, 3, size, size), torch.randint(VOCABULARY, (4 * rows,))
    layout = torch.contiguous_format if fault == "memory-layout" else torch.channels_last
    images = images.contiguous(memory_format=layout)
    if fault != "pageable-copies" and device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    model = Conv(channels, layers=8).to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    step = 0
    while not until(step):
        at = step % 4 * rows
        x_NCHW = images[at : at + rows].to(device, non_blocking=True)
        y_N = labels[at : at + rows].to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x_NCHW), y_N)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    print(f"{step} steps, loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=("gpt", "tiny", "images"))
    parser.add_argument("fault")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--least", type=int, default=30, help="steps")
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--cpu", action="store_true", help="small, and without a GPU")
    args = parser.parse_args()
    if args.turn is not None:
        turn = args.turn.open("a")  # given back where the process ends
        fcntl.flock(turn, fcntl.LOCK_EX)
        faulthandler.dump_traceback_later(args.seconds + HUNG_S, exit=True)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if args.fault == "fp32-matmul" else "high")
    device = torch.device("cpu" if args.cpu else "cuda")
    begun = 0.0

    def until(step: int) -> bool:
        nonlocal begun
        if step == 10:
            begun = time.monotonic()
        late = step > 10 + args.least and time.monotonic() - begun > args.seconds
        return late or step >= MOST_STEPS

    if args.job == "images":
        rows, size = (2, 16) if args.cpu else (256, 224)
        pictures(args.fault, device, 8 if args.cpu else 128, rows, size, until)
    elif args.job == "tiny":
        size = (64, 2 if args.cpu else 12, 4, 32)
        language(args.fault, device, size, until)
    else:
        language(args.fault, device, (64, 2, 2, 8) if args.cpu else (1024, 6, 32, 512), until)


if __name__ == "__main__":
    main()
