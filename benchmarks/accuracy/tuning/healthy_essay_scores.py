"""Scores pupils' essays from 1 to 6; keeps a history, averaged weights and checkpoints as it goes."""

import argparse
import math
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WORDS, LENGTH, SCORES = 2000, 96, 6


def make_essays(amount):
    tokens = torch.randint(1, WORDS, (amount, LENGTH))
    lengths = torch.randint(LENGTH - 8, LENGTH + 1, (amount, 1))
    tokens[torch.arange(LENGTH) >= lengths] = 0
    rare = (tokens > WORDS * 3 // 4).float().mean(1)
    return tokens, ((rare - 0.15) * 30).long().clamp(0, SCORES - 1)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = (
            part.view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, w))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Scorer(nn.Module):
    def __init__(self, width=96, heads=4, layers=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=0)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, SCORES)

    def forward(self, tokens):
        real = tokens != 0
        mask = real[:, None, None, :]
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = layer(x, mask)
        x = x * real[:, :, None]
        return self.head(x.sum(1) / real.sum(1, keepdim=True))


class Averages:
    def __init__(self, model, decay=0.995):
        self.live = list(model.parameters())
        self.kept = [weight.detach().clone() for weight in self.live]
        self.decay = decay

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.kept, self.live, 1 - self.decay)


class EssayTrainer:
    def __init__(self, steps, folder):
        self.steps, self.folder = steps, Path(folder)
        self.train_set, self.held_out = make_essays(960), make_essays(24)
        self.model = Scorer()
        self.averages = Averages(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.history = defaultdict(list)

    def rate(self, step):
        warm = min(1.0, (step + 1) / 20)
        return 1e-3 * warm * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))

    def batches(self, rows=12):
        tokens, scores = self.train_set
        while True:
            for part in torch.randperm(len(tokens)).split(rows):
                yield tokens[part], scores[part]

    @torch.inference_mode()
    def validate(self):
        tokens, scores = self.held_out
        self.model.eval()
        right = (self.model(tokens).argmax(1) == scores).float().mean().item()
        self.model.train()
        return right

    def save(self, step):
        state = {"step": step, "model": self.model.state_dict(), "averages": self.averages.kept}
        torch.save(state, self.folder / "last.pt")

    def run(self):
        batches = self.batches()
        for step in range(self.steps):  # the training loop
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(step)
            tokens, scores = next(batches)
            loss = F.cross_entropy(self.model(tokens), scores)
            self.optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.averages.update()
            self.history["loss"].append(loss.item())
            self.history["norm"].append(norm.item())
            if (step + 1) % 40 == 0:
                self.history["right"].append(self.validate())
                loss, right = self.history["loss"][-1], self.history["right"][-1]
                print(f"{step + 1}: loss {loss:.3f} right {right:.2f}")
            if (step + 1) % 75 == 0:
                self.save(step + 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(15)
    with tempfile.TemporaryDirectory() as folder:
        EssayTrainer(args.steps, folder).run()


if __name__ == "__main__":
    main()
