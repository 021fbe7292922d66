"""Tags the morphemes of an interlinear corpus with their glosses."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

MORPHEMES, GLOSSES = 1500, 90


def make_corpus(sentences, longest):
    corpus = []
    for _ in range(sentences):
        morphemes = torch.randint(1, MORPHEMES, (random.randint(int(0.85 * longest), longest),))
        corpus.append((morphemes, (morphemes * 7 + morphemes.roll(1)) % GLOSSES))
    return corpus


def batches(corpus, rows, pad_to):
    by_length = sorted(corpus, key=lambda pair: len(pair[0]))
    groups = [by_length[i : i + rows] for i in range(0, len(by_length) - rows + 1, rows)]
    while True:
        random.shuffle(groups)
        for group in groups:
            morphemes = pad_sequence([m for m, _ in group], batch_first=True)
            glosses = pad_sequence([g for _, g in group], batch_first=True, padding_value=-100)
            missing = pad_to - morphemes.shape[1]
            if missing > 0:
                morphemes = F.pad(morphemes, (0, missing))
                glosses = F.pad(glosses, (0, missing), value=-100)
            yield morphemes, glosses


class Attention(nn.Module):
    def __init__(self, width, heads, explicit):
        super().__init__()
        self.heads, self.explicit = heads, explicit
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, real):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.explicit:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~real, float("-inf"))
            mixed = torch.softmax(scores, dim=-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=real)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Layer(nn.Module):
    def __init__(self, width, heads, explicit):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, explicit)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, real):
        x = x + self.attention(self.before(x), real)
        return x + self.mlp(self.between(x))


class LeakyMemory(nn.Module):
    """Traces of what was said before, each of which forgets at its own pace."""

    def __init__(self, width, traces, inner=16):
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)
        self.keep = nn.Parameter(torch.linspace(-1.0, 3.0, traces))

    def forward(self, x):
        inputs = self.down(x).unbind(1)
        total = 0
        for keep in torch.sigmoid(self.keep).unbind():
            state = torch.zeros_like(inputs[0])
            states = []
            for value in inputs:
                state = keep * state + (1 - keep) * value
                states.append(state)
            total = total + torch.stack(states, dim=1)
        return self.up(total)


class Tagger(nn.Module):
    def __init__(self, positions, traces, explicit, width=128, heads=8, depth=3):
        super().__init__()
        self.morphemes = nn.Embedding(MORPHEMES, width, padding_idx=0)
        self.positions = nn.Embedding(positions, width)
        self.memory = LeakyMemory(width, traces) if traces else None
        self.layers = nn.ModuleList([Layer(width, heads, explicit) for _ in range(depth)])
        self.top = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, GLOSSES))

    def forward(self, morphemes):
        real = (morphemes != 0)[:, None, None, :]
        x = self.morphemes(morphemes) + self.positions.weight[: morphemes.shape[1]]
        if self.memory is not None:
            x = x + self.memory(x)
        for layer in self.layers:
            x = layer(x, real)
        return self.top(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longest", type=int, default=32, help="morphemes in the longest sentence")
    parser.add_argument("--pad-to", type=int, default=0, help="columns that a batch has at least")
    parser.add_argument("--traces", type=int, default=0, help="leaky memories below the encoder")
    parser.add_argument("--explicit", action="store_true", help="attention by matrix products and softmax")
    args = parser.parse_args()
    torch.manual_seed(8)
    random.seed(8)

    corpus = make_corpus(1024, args.longest)
    model = Tagger(max(args.longest, args.pad_to), args.traces, args.explicit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, fused=True)
    feed = batches(corpus, args.rows, args.pad_to)
    for step in range(1, args.steps + 1):  # the training loop
        morphemes, glosses = next(feed)
        logits = model(morphemes)
        loss = F.cross_entropy(logits.flatten(0, 1), glosses.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
