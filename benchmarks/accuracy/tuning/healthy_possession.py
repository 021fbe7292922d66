"""Win probability in basketball from the last events of a game, on two ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

KINDS, EVENTS, GAMES = 60, 48, 1024


class EventLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        games, events, width = x.shape
        qkv = self.qkv(self.before(x)).view(games, events, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(games, events, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class WinProbability(nn.Module):
    def __init__(self, width=96, heads=4, depth=2):
        super().__init__()
        self.kind = nn.Embedding(KINDS, width)
        self.situation = nn.Linear(5, width)
        self.place = nn.Parameter(torch.zeros(EVENTS, width))
        self.layers = nn.Sequential(*(EventLayer(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, kinds, situations):
        x = self.kind(kinds) + self.situation(situations) + self.place
        return self.head(self.layers(x)).squeeze(-1)


class Season:
    """The games of one rank, in a new order each time they have all been seen."""

    def __init__(self, rank, batch):
        self.batch = batch
        self.shuffle = torch.Generator().manual_seed(rank)
        self.kinds = torch.randint(0, KINDS, (GAMES, EVENTS), generator=self.shuffle)
        self.situations = torch.randn(GAMES, EVENTS, 5, generator=self.shuffle)
        self.won = (self.situations[:, :, 0].mean(1, keepdim=True) > 0).float().expand(-1, EVENTS)

    def __iter__(self):
        while True:
            for part in torch.randperm(GAMES, generator=self.shuffle).split(self.batch):
                yield self.kinds[part], self.situations[part], self.won[part]


def run(steps):
    torch.manual_seed(23)
    model = DistributedDataParallel(WinProbability(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    season = iter(Season(dist.get_rank(), batch=16))
    total = torch.zeros(())
    for step in range(1, steps + 1):  # the training loop
        kinds, situations, won = next(season)
        loss = F.binary_cross_entropy_with_logits(model(kinds, situations), won)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        total += loss.detach()
        if step % 50 == 0:
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {total.item() / 50 / dist.get_world_size():.4f}", flush=True)
            total.zero_()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
