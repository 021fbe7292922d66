"""Pre-trains a transformer to fill in masked patches: few and long steps, EMA every tenth."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WIDTH, HEADS, PATCHES, PIXELS = 192, 4, 64, 48


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.mix(seen)
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class FillIn(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.embed, self.restore = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, PIXELS)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH) / 50)
        self.blank = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(depth)), nn.LayerNorm(WIDTH))

    def forward(self, patches, hidden):
        x = torch.where(hidden[..., None], self.blank, self.embed(patches))
        return self.restore(self.layers(x + self.place))


def learning_rate(step, warmup=20, total=400):
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))


cli = argparse.ArgumentParser()
cli.add_argument("--steps", type=int, default=110)
args = cli.parse_args()

torch.manual_seed(31)
pictures = torch.randn(160, PATCHES, PIXELS)
model = FillIn(depth=2)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
for step in range(args.steps):  # the training loop
    part = pictures[torch.randint(len(pictures), (12,))]
    hidden = torch.rand(12, PATCHES) < 0.5
    loss = (model(part, hidden) - part).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 10 == 9:
        average.update_parameters(model)
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.4f}")
