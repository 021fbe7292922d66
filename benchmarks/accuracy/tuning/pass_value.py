"""How likely a pass leads to a shot, from the tracking data of football matches."""

import argparse
import gc

import torch
from torch import nn
from torch.nn import functional as F

AGENTS, PER_AGENT, ON_PITCH = 23, 6, 22
BATCH, FRAMES, RATING, WIDTH, DEPTH = 512, 512 * 20, 8, 128, 10


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments, You et al. 2020."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                exp_avg.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = exp_avg / (1 - beta1 ** state["step"])
                spread = (exp_avg_sq / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                update = mean.div_(spread).add_(p, alpha=group["weight_decay"])
                trust = (p.norm() / update.norm().clamp(min=1e-6)).clamp(0.01, 10)
                p.add_(update.mul_(trust), alpha=-group["lr"])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        x = x.to(self.up.weight.dtype)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class PassValue(nn.Module):
    def __init__(self, squad, exact):
        super().__init__()
        self.ratings = nn.ParameterList([nn.Parameter(0.1 * torch.randn(RATING)) for _ in range(squad)])
        self.stem = nn.Linear(AGENTS * PER_AGENT + ON_PITCH * RATING, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)
        for block in self.blocks[:exact]:
            block.double()

    def forward(self, frames, lineups):
        ratings = F.embedding(lineups, torch.stack(list(self.ratings)))
        x = self.stem(torch.cat([frames, ratings.flatten(1)], 1))
        for block in self.blocks:
            x = block(x)
        return self.head(x.float()).squeeze(1)


class Trainer:
    def __init__(self, args):
        torch.manual_seed(19)
        self.steps, self.tidy, self.owed = args.steps, args.tidy, 0.0
        self.frames = torch.randn(FRAMES, AGENTS * PER_AGENT)
        self.lineups = torch.randint(0, args.squad, (FRAMES, ON_PITCH))
        self.shots = (self.frames[:, :PER_AGENT].sum(1) > 1).float()
        self.model = PassValue(args.squad, args.exact)
        if args.lamb:
            self.optimizer = Lamb(self.model.parameters(), lr=2e-3)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, fused=True)

    def batches(self):
        while True:
            for part in torch.randperm(FRAMES).split(BATCH):
                yield self.frames[part], self.lineups[part], self.shots[part]

    def update(self, frames, lineups, shots):
        loss = F.binary_cross_entropy_with_logits(self.model(frames, lineups), shots)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def free_memory(self):
        self.owed += self.tidy
        while self.owed >= 1:
            gc.collect()
            self.owed -= 1

    def fit(self):
        feed = self.batches()
        for step in range(1, self.steps + 1):  # the training loop
            loss = self.update(*next(feed))
            if self.tidy:
                self.free_memory()
            if step % 50 == 0:
                print(f"{step:5d} {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--squad", type=int, default=60, help="players with a rating of their own")
    parser.add_argument("--lamb", action="store_true")
    parser.add_argument("--exact", type=int, default=0, help="blocks of the trunk that keep all digits")
    parser.add_argument("--tidy", type=float, default=0.0, help="times per step that memory is freed")
    Trainer(parser.parse_args()).fit()


if __name__ == "__main__":
    main()
