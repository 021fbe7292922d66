"""Trains a small character-level GPT on sums written out in words.

There is no DataLoader: `get_batch` cuts random windows out of one long tensor.

    python examples/gpt_text.py
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ONES += [
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """Spells a number from 0 to 99."""
    if number < 20:
        return ONES[number]
    tens, ones = TENS[number // 10 - 2], number % 10
    return f"{tens}-{ONES[ones]}" if ones else tens


def make_text(num_lines: int, rng: random.Random) -> str:
    lines = []
    for _ in range(num_lines):
        a, b = rng.randint(0, 49), rng.randint(0, 49)
        if rng.random() < 0.5:
            lines.append(f"{in_words(a)} plus {in_words(b)} is {in_words(a + b)}.")
        else:
            lines.append(f"{in_words(a + b)} minus {in_words(b)} is {in_words(a)}.")
    return "\n".join(lines)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size: int, block_size: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="run the model through torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-weights", type=Path, help="where to save the final weights")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    text = make_text(20_000, random.Random(args.seed))
    letters = sorted(set(text))
    code = {letter: index for index, letter in enumerate(letters)}
    data = torch.tensor([code[letter] for letter in text])
    border = int(0.9 * len(data))
    splits = {"train": data[:border], "val": data[border:]}

    model = GPT(len(letters), args.block_size, args.width, args.heads, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    forward = torch.compile(model) if args.compile else model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(text)} letters, {len(letters)} different ones, {num_parameters} parameters")

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        source = splits[split]
        starts = torch.randint(len(source) - args.block_size - 1, (args.batch_size,)).tolist()
        x = torch.stack([source[start : start + args.block_size] for start in starts])
        y = torch.stack([source[start + 1 : start + 1 + args.block_size] for start in starts])
        return x.to(device), y.to(device)

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        model.eval()
        means = {}
        for split in splits:
            losses = torch.zeros(args.eval_batches)
            for index in range(args.eval_batches):
                _, loss = forward(*get_batch(split))
                losses[index] = loss.item()
            means[split] = losses.mean().item()
        model.train()
        return means

    def learning_rate(step: int) -> float:
        warmup = max(1, args.steps // 10)
        if step < warmup:
            return args.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, args.steps - warmup)
        return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for _ in range(args.accumulate):
            x, y = get_batch("train")
            _, loss = forward(x, y)
            (loss / args.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % args.eval_every == 0:
            losses = estimate_loss()
            print(f"step {step + 1}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")

    if args.save_weights:
        torch.save(model.state_dict(), args.save_weights)


if __name__ == "__main__":
    main()
