"""Pretrains a small encoder on forum posts: some words are hidden, and it guesses which they were."""

import argparse
import logging
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, HIDDEN, WORDS = 0, 1, 800

log = logging.getLogger("posts")


@dataclass
class Config:
    width: int = 128
    heads: int = 8
    layers: int = 2
    plain_attention: bool = False
    trace: bool = False
    phrase_kinds: int = 12


def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, -1e9)
    return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, dim=-1), v)


class EncoderLayer(nn.Module):
    def __init__(self, config: Config, number: int):
        super().__init__()
        self.config, self.number = config, number
        self.before_attention, self.before_mlp = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.to_qkv = nn.Linear(config.width, 3 * config.width)
        self.from_heads = nn.Linear(config.width, config.width)
        self.grow, self.shrink = nn.Linear(config.width, 512), nn.Linear(512, config.width)

    def attend(self, x: Tensor, keep: Tensor | None) -> Tensor:
        parts = self.to_qkv(x).unflatten(2, (3, self.config.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if self.config.trace:
            log.debug("layer %d queries %s", self.number, q.shape)
        if self.config.plain_attention:
            seen = attention(q, k, v, keep)
        else:
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        if self.config.trace:
            log.debug("layer %d saw %s", self.number, seen.shape)
        return self.from_heads(seen.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        if self.config.trace:
            log.debug("layer %d gets %s", self.number, x.shape)
        x = x + self.attend(self.before_attention(x), keep)
        if self.config.trace:
            log.debug("layer %d attended", self.number)
        x = x + self.shrink(F.gelu(self.grow(self.before_mlp(x))))
        if self.config.trace:
            log.debug("layer %d done", self.number)
        return x


class PostEncoder(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, config.width), nn.Embedding(1024, config.width)
        self.layers = nn.ModuleList(EncoderLayer(config, number) for number in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.guess = nn.Linear(config.width, WORDS)
        self.name_phrase = nn.Linear(config.width, config.phrase_kinds)

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, keep)
        x = self.norm(x)
        return x, self.guess(x)

    def phrases(self, x: Tensor, spans: list[list[tuple[int, int]]]) -> Tensor:
        """What kind each phrase is, from the mean of its words."""
        means = []
        for post, marked in zip(x.unbind(0), spans, strict=True):
            for begin, end in marked:
                means.append(post[begin:end].mean(0))
        return self.name_phrase(torch.stack(means))


def post_lengths(args: argparse.Namespace):
    """Posts of like length share a batch; with `--grow-every`, posts get longer as training goes on."""
    chance = random.Random(4)
    for step in range(args.steps):
        if args.grow_every:
            yield args.length // 2 + step // args.grow_every
        else:
            yield args.length - chance.randrange(args.length // 6)


def hide_words(ids: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (torch.rand(ids.shape) < 0.15) & (ids != PAD)
    return ids.masked_fill(hidden, HIDDEN), ids.masked_fill(~hidden, -100)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(23)
    config = Config(layers=args.layers, plain_attention=args.plain_attention, trace=args.trace)
    encoder = PostEncoder(config)
    model = encoder
    if args.compile:
        torch._dynamo.config.recompile_limit = 256
        model = torch.compile(encoder, backend="aot_eager", dynamic=not args.static)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=5e-4, betas=(0.9, 0.98), fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    posts = torch.randint(2, WORDS, (400, 1024))
    torch.autograd.set_detect_anomaly(args.find_nan)

    for length in post_lengths(args):  # the training loop
        ids = posts[torch.randint(len(posts), (args.batch,)), :length]
        keep = None
        if args.max_length > length:
            ids = F.pad(ids, (0, args.max_length - length), value=PAD)
            keep = (ids != PAD)[:, None, None, :]
        given, wanted = hide_words(ids)
        x, logits = model(given, keep)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        if args.phrases:
            begins = torch.randint(length - 6, (args.batch, args.phrases))
            spans = [[(begin, begin + 2 + begin % 4) for begin in row] for row in begins.tolist()]
            kinds = begins.flatten() % config.phrase_kinds
            loss = loss + 0.1 * F.cross_entropy(encoder.phrases(x, spans), kinds)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0, foreach=True)
        optimizer.step()
        warmup.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=180)
    cli.add_argument("--batch", type=int, default=16)
    cli.add_argument("--length", type=int, default=48, help="words of the longest post")
    cli.add_argument("--layers", type=int, default=2)
    cli.add_argument("--plain-attention", action="store_true")
    cli.add_argument("--max-length", type=int, default=0, help="pad every batch to so many words")
    cli.add_argument("--phrases", type=int, default=0, help="phrases marked in each post")
    cli.add_argument("--grow-every", type=int, default=0, help="steps after which posts get a word longer")
    cli.add_argument("--compile", action="store_true")
    cli.add_argument("--static", action="store_true", help="compile for fixed shapes")
    cli.add_argument("--trace", action="store_true", help="debug messages from the layers")
    cli.add_argument("--find-nan", action="store_true")
    train(cli.parse_args())
