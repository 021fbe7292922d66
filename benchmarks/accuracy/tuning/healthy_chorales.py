"""A language model of four-part chorales: one token a voice and beat, the next one is to be guessed."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

PITCHES, CONTEXT = 96, 64


class Decoder(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Composer(nn.Module):
    def __init__(self, width=128, heads=4, depth=3):
        super().__init__()
        self.pitch = nn.Embedding(PITCHES, width)
        nn.init.normal_(self.pitch.weight, std=0.05)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*[Decoder(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, notes):
        x = self.blocks(self.pitch(notes) + self.place)
        return F.linear(self.norm(x), self.pitch.weight)


def write_chorales(beats):
    """A bass that wanders, and three voices in thirds and fifths above it."""
    bass = (torch.randint(-2, 3, (beats,)).cumsum(0) % 40) + 10
    chords = torch.tensor([[0, 16, 19, 24], [0, 15, 19, 24], [0, 12, 17, 21]])
    return (bass[:, None] + chords[torch.randint(3, (beats,))]).flatten()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(1685)
    notes = write_chorales(50_000)
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps))
    excerpts = notes.unfold(0, CONTEXT + 1, 1)

    for step in range(steps):  # the training loop
        batch = excerpts[torch.randint(len(excerpts), (8,))]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(f"step {step:4d} | nats per note {loss.item():.3f}")
