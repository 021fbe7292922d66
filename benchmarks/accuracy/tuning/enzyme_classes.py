"""Predicts the enzyme class of a protein from its residues, with a small transformer."""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

RESIDUES, CLASSES, PAD = 20, 6, 0


@dataclass(frozen=True)
class Config:
    steps: int
    max_len: int = 0
    mc_passes: int = 0
    replay: int = 0
    batch: int = 16
    width: int = 80
    heads: int = 5
    layers: int = 5
    rate: float = 6e-4
    layer_decay: float = 0.85


class Block(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.heads = cfg.heads
        self.norm1, self.norm2 = nn.LayerNorm(cfg.width), nn.LayerNorm(cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.width, 4 * cfg.width), nn.GELU(), nn.Linear(4 * cfg.width, cfg.width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(b, t, w)))
        return x + self.drop(self.mlp(self.norm2(x)))


def sinusoids(length: int, width: int) -> Tensor:
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    return torch.cat([angle.sin(), angle.cos()], 1)


class ProteinEncoder(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(RESIDUES + 1, cfg.width)
        self.register_buffer("place", sinusoids(max(2048, cfg.max_len), cfg.width), persistent=False)
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(cfg.layers)])
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        there = tokens != PAD
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, there[:, None, None, :])
        weight = there.unsqueeze(-1).to(x.dtype)
        return self.head((self.norm(x) * weight).sum(1) / weight.sum(1))


def make_proteins(amount: int) -> tuple[list[Tensor], Tensor]:
    profiles = torch.randn(CLASSES, RESIDUES).softmax(-1)
    kinds = torch.randint(CLASSES, (amount,))
    lengths = torch.randint(84, 117, (amount,))
    proteins = [
        torch.multinomial(profiles[kind], length, replacement=True) + 1
        for kind, length in zip(kinds.tolist(), lengths.tolist(), strict=False)
    ]
    return proteins, kinds


def batches(proteins: list[Tensor], kinds: Tensor, cfg: Config) -> Iterator[tuple[Tensor, Tensor]]:
    groups = torch.tensor([len(protein) for protein in proteins]).argsort().split(cfg.batch)
    while True:
        for number in torch.randperm(len(groups)).tolist():
            picked = groups[number]
            tokens = pad_sequence(
                [proteins[index] for index in picked.tolist()], batch_first=True, padding_value=PAD
            )
            if tokens.shape[1] < cfg.max_len:
                tokens = F.pad(tokens, (0, cfg.max_len - tokens.shape[1]), value=PAD)
            yield tokens, kinds[picked]


def layerwise_groups(model: ProteinEncoder, cfg: Config) -> list[dict]:
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if name.startswith("blocks."):
            depth = 1 + int(name.split(".")[1])
        else:
            depth = 0 if name.startswith("embed.") else cfg.layers + 1
        groups.setdefault((depth, parameter.ndim > 1), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": cfg.rate * cfg.layer_decay ** (cfg.layers + 1 - depth),
            "weight_decay": 0.02 if decays else 0.0,
        }
        for (depth, decays), parameters in groups.items()
    ]


class ReplayedCurve:
    """The learning rates of an earlier run, smoothed, stretched to the length of this one."""

    def __init__(self, points: int, steps: int) -> None:
        noise = random.Random(5)
        self.at = [steps * number / points for number in range(points)]
        self.factor = [0.1 + 0.9 * math.sin(math.pi * at / steps) + 0.05 * noise.random() for at in self.at]
        self.width = 3 * steps / points

    def __call__(self, step: int) -> float:
        near = [math.exp(-(((step - at) / self.width) ** 2)) for at in self.at]
        return sum(weight * factor for weight, factor in zip(near, self.factor, strict=False)) / sum(near)


def warmup_cosine(steps: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))

    return factor


@torch.no_grad()
def uncertainty(model: ProteinEncoder, tokens: Tensor, passes: int) -> Tensor:
    mean = torch.stack([model(tokens).softmax(-1) for _ in range(passes)]).mean(0)
    return -(mean * mean.clamp_min(1e-9).log()).sum(-1).mean()


def train(cfg: Config) -> None:
    torch.manual_seed(29)
    proteins, kinds = make_proteins(1600)
    model = ProteinEncoder(cfg)
    optimizer = torch.optim.AdamW(layerwise_groups(model, cfg), lr=cfg.rate, fused=True)
    curve = ReplayedCurve(cfg.replay, cfg.steps) if cfg.replay else warmup_cosine(cfg.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, curve)
    feed = batches(proteins, kinds, cfg)
    doubt = torch.zeros(())
    for step in range(1, cfg.steps + 1):  # the training loop
        tokens, truth = next(feed)
        loss = F.cross_entropy(model(tokens), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if cfg.mc_passes:
            doubt = 0.95 * doubt + 0.05 * uncertainty(model, tokens, cfg.mc_passes)
        if step % 50 == 0:
            print(f"{step:5d} loss {loss.item():.3f} doubt {doubt.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-len", type=int, default=0, help="residues in a row of a batch, at least")
    parser.add_argument("--mc-passes", type=int, default=0, help="for the uncertainty in the log")
    parser.add_argument("--replay", type=int, default=0, help="points of an earlier run's learning rates")
    train(Config(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
