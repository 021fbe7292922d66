"""Trains a small decoder to translate: it continues `<start> source <separator>` with the target phrase."""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

START, SEPARATOR, FIRST_WORD = 0, 1, 2


@dataclass(frozen=True)
class Config:
    steps: int = 200
    length: int = 48
    rows: int = 16
    explicit: bool = False
    remat: int = 0
    vocabulary: int = 600
    width: int = 96
    heads: int = 12
    depth: int = 6
    lr: float = 6e-4
    warmup: int = 30

    @property
    def words(self) -> int:
        """Words of a source phrase, and of a target phrase."""
        return (self.length - 2) // 2


class SelfAttention(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.heads = cfg.heads
        self.explicit = cfg.explicit
        self.inward = nn.Linear(cfg.width, 3 * cfg.width)
        self.outward = nn.Linear(cfg.width, cfg.width)
        visible = torch.ones(cfg.length, cfg.length, dtype=torch.bool).tril()
        self.register_buffer("visible", visible, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        packed = self.inward(x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        if self.explicit:
            scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
            scores = scores.masked_fill(~self.visible[:length, :length], float("-inf"))
            mixed = torch.softmax(scores, dim=-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outward(mixed.transpose(1, 2).reshape(rows, length, width))


class Layer(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.before_attention = nn.LayerNorm(cfg.width)
        self.attention = SelfAttention(cfg)
        self.before_hidden = nn.LayerNorm(cfg.width)
        self.hidden = nn.Sequential(
            nn.Linear(cfg.width, 2 * cfg.width), nn.ReLU(), nn.Linear(2 * cfg.width, cfg.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.hidden(self.before_hidden(x))


def run_layers(layers: list[Layer], x: Tensor, levels: int) -> Tensor:
    """Runs the layers; with levels, keeps only the inputs of halves, of halves of halves, and so on."""
    if levels == 0:
        for layer in layers:
            x = layer(x)
        return x
    middle = (len(layers) + 1) // 2
    for half in (layers[:middle], layers[middle:]):
        if half:
            x = checkpoint(run_layers, half, x, levels - 1, use_reentrant=True)
    return x


class Translator(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.remat = cfg.remat
        self.words = nn.Embedding(cfg.vocabulary, cfg.width)
        self.places = nn.Embedding(cfg.length, cfg.width)
        self.layers = nn.ModuleList([Layer(cfg) for _ in range(cfg.depth)])
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocabulary)

    def forward(self, tokens: Tensor, last: int) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        x = run_layers(list(self.layers), x, self.remat)
        return self.head(self.norm(x[:, -last:]))


def make_corpus(cfg: Config, phrases: int = 4096) -> Tensor:
    """Returns phrases and their translations: word by word through a lexicon, in the opposite order."""
    lexicon = torch.randperm(cfg.vocabulary - FIRST_WORD) + FIRST_WORD
    source = torch.randint(FIRST_WORD, cfg.vocabulary, (phrases, cfg.words))
    target = lexicon[source - FIRST_WORD].flip(1)
    start, separator = torch.full((phrases, 1), START), torch.full((phrases, 1), SEPARATOR)
    return torch.cat([start, source, separator, target], 1)


def batches(corpus: Tensor, rows: int):
    while True:
        for picked in torch.randperm(len(corpus)).split(rows):
            yield corpus[picked]


def train(cfg: Config) -> None:
    torch.manual_seed(17)
    corpus = make_corpus(cfg)
    model = Translator(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / cfg.warmup))
    for step, phrases in zip(
        range(cfg.steps), batches(corpus, cfg.rows), strict=False
    ):  # the training loop
        logits = model(phrases[:, :-1], cfg.words)
        loss = F.cross_entropy(logits.flatten(0, 1), phrases[:, -cfg.words :].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: perplexity {math.exp(loss.item()):.1f}")


def parse() -> Config:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=48, help="tokens of both phrases and the two marks")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--explicit", action="store_true", help="attention with visible scores")
    parser.add_argument("--remat", type=int, default=0, help="levels of activation checkpointing")
    return Config(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse())
