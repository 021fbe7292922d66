"""A small transformer on characters; batches are cut out of one long text, without a DataLoader."""

import torch
from _common import arguments, print_weights
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.before(x)).split(c, 2)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self, letters=64, width=96, length=64):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(6)])
        self.head = nn.Linear(width, letters)

    def forward(self, x):
        return self.head(self.blocks(self.letters(x) + self.places(torch.arange(x.shape[1]))))


if __name__ == "__main__":
    args = arguments()
    text = torch.randint(64, (200_000,))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def get_batch():
        starts = torch.randint(len(text) - 65, (8,))
        rows = torch.stack([text[start : start + 65] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    for _ in range(args.steps):
        x, y = get_batch()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
