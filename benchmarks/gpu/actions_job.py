"""The job of `actions.py`: a small GPT, or a network of convolutions, as users write them.

python benchmarks/gpu/actions_job.py gpt|conv|ddp [--steps 1000] [--workers 2] [--short] [--large] [--math]
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 96
LENGTH = 64
WIDTH = 256


class Block(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        parts = self.qkv(self.norms[0](x_BTD)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x_BTD = x_BTD + self.out(seen.transpose(1, 2).reshape(B, T, WIDTH))
        return x_BTD + self.narrow(F.gelu(self.wide(self.norms[1](x_BTD))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(x_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


class Conv(nn.Module):
    def __init__(self, channels: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(layers))
        self.head = nn.Linear(channels, VOCABULARY)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW = self.stem(x_NCHW)
        for conv, norm in zip(self.body, self.norms, strict=True):
            x_NCHW = x_NCHW + F.relu(norm(conv(x_NCHW)))
        return self.head(x_NCHW.mean((2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("gpt", "conv", "ddp"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--math", action="store_true", help="attention by torch's slowest kernel alone")
    parser.add_argument("--short", action="store_true", help="hardly more memory than it needs")
    parser.add_argument("--large", action="store_true", help="some batches need far more than there is")
    parser.add_argument("--cpu", action="store_true", help="small, and without a GPU")
    args = parser.parse_args()
    torch.manual_seed(0)
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(not args.math)
    device = torch.device("cpu" if args.cpu else "cuda")
    rows = 2 if args.cpu else 32
    if args.model == "conv":
        size = 8 if args.cpu else 32
        inputs, targets = torch.randn(8 * rows, 3, size, size), torch.randint(VOCABULARY, (8 * rows,))
    else:
        length = 8 if args.cpu else LENGTH
        inputs = torch.randint(VOCABULARY, (8 * rows, length))
        targets = inputs.roll(-1, 1)
    model: nn.Module = Conv() if args.model == "conv" else Gpt()
    model.to(device)
    if args.model == "ddp":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713", "RANK": "0", "WORLD_SIZE": "1"}
        torch.distributed.init_process_group("gloo" if args.cpu else "nccl")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(
        TensorDataset(inputs, targets), batch_size=rows, shuffle=True, num_workers=args.workers
    )
    step = 0
    while step < args.steps:
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            if args.large and step > args.steps // 2 and step % 100 == 99:
                x, y = x.repeat(8, 1), y.repeat(8, 1)
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 5 and args.short:
                limit = 1.05 * torch.cuda.max_memory_allocated()
                torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
            if step % 100 == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                break
    if args.model == "ddp":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
