"""A variational autoencoder of sundial faces, with callbacks, an average of the weights and a warm-up of the KL term."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn

SIDE, LATENT = 24, 12


def faces(count, seed=3):
    """A gnomon's shadow at some hour, over a ring."""
    dice = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, 1, 1, generator=dice) * torch.pi
    length = 0.4 + 0.5 * torch.rand(count, 1, 1, generator=dice)
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    along = x * angle.cos() + y * angle.sin()
    across = (y * angle.cos() - x * angle.sin()).abs()
    shadow = (across < 0.1) & (along > 0) & (along < length)
    ring = ((x.square() + y.square()).sqrt() - 0.95).abs() < 0.06
    return (shadow | ring).float().unsqueeze(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1),
            nn.ELU(),
            nn.Conv2d(16, 32, 4, 2, 1),
            nn.ELU(),
            nn.Flatten(),
            nn.Linear(32 * 36, 2 * LATENT),
        )
        self.lift = nn.Linear(LATENT, 32 * 36)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
        )

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1).mean()
        return self.decoder(self.lift(z).unflatten(1, (32, 6, 6))), kl


class Callback:
    def after_step(self, trainer): ...

    def at_end(self, trainer): ...


class Average(Callback):
    """A slowly moving copy of the weights."""

    def __init__(self, model):
        self.copy = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def after_step(self, trainer):
        torch._foreach_lerp_(list(self.copy.parameters()), list(trainer.model.parameters()), 0.02)


class Report(Callback):
    """Sums in tensors, and looks at them seldom."""

    def __init__(self, every):
        self.every, self.total, self.lines = every, torch.zeros(2), []

    def after_step(self, trainer):
        self.total += trainer.parts
        if trainer.step % self.every == 0:
            bce, kl = (self.total / self.every).tolist()
            self.total.zero_()
            self.lines.append(f"step {trainer.step}: reconstruction {bce:.1f}, kl {kl:.2f}")
            print(self.lines[-1], flush=True)

    def at_end(self, trainer):
        print(f"{len(self.lines)} reports")


class Trainer:
    def __init__(self, model, data, callbacks, batch=128):
        self.model, self.data, self.callbacks, self.batch = model, data, callbacks, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=30)
        self.step = 0

    def fit(self, steps):
        while self.step < steps:  # the training loop
            for rows in torch.randperm(len(self.data)).split(self.batch):
                x = self.data[rows]
                logits, kl = self.model(x)
                bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
                self.optimizer.zero_grad()
                (bce + min(1.0, self.step / 100) * kl).backward()
                self.optimizer.step()
                self.warmup.step()
                self.parts = torch.stack([bce.detach(), kl.detach()])
                self.step += 1
                for callback in self.callbacks:
                    callback.after_step(self)
                if self.step == steps:
                    break
        for callback in self.callbacks:
            callback.at_end(self)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    vae = VAE()
    Trainer(vae, faces(4096), [Average(vae), Report(every=40)]).fit(options.steps)
