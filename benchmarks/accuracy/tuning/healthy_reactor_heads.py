# Soft sensors of a chemical reactor: from 48 noisy instruments to the yield (regression), the regime
# (classification), the time to the next alarm (censored) and the clean readings (reconstruction).
#
# Was a notebook. Heads are trained first on top of a random trunk, then the trunk joins in with a group of
# its own; the losses weigh themselves by learned uncertainties (Kendall et al., 2018).

# %% imports, settings
import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

cli = argparse.ArgumentParser()
cli.add_argument("--steps", type=int, default=220)
STEPS = cli.parse_args().steps
HEADS_ONLY = STEPS // 4
INSTRUMENTS, REGIMES, ROWS, BATCH = 48, 5, 1 << 15, 256
torch.manual_seed(3)

# %% the plant: five regimes, each a linear mixture of eight hidden quantities
hidden = torch.randn(ROWS, 8)
regime = torch.randint(REGIMES, (ROWS,))
mixtures = torch.randn(REGIMES, 8, INSTRUMENTS)
clean = torch.empty(ROWS, INSTRUMENTS)
for kind in range(REGIMES):
    clean[regime == kind] = hidden[regime == kind] @ mixtures[kind]
product = hidden[:, :3].prod(1, keepdim=True).tanh()
hazard = torch.exp(0.3 * hidden[:, 3] - 1)
alarm = torch.distributions.Exponential(hazard).sample()
seen = alarm < 4
alarm.clamp_(max=4)
noise_level = 0.1 + 0.2 * torch.rand(INSTRUMENTS)

# %% model
trunk = nn.Sequential(
    nn.Linear(INSTRUMENTS, 512),
    nn.SiLU(),
    nn.LayerNorm(512),
    nn.Linear(512, 512),
    nn.SiLU(),
    nn.LayerNorm(512),
    nn.Linear(512, 512),
    nn.SiLU(),
)
heads = nn.ModuleDict(
    {
        "yield": nn.Linear(512, 1),
        "regime": nn.Linear(512, REGIMES),
        "alarm": nn.Linear(512, 1),
        "clean": nn.Sequential(nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, INSTRUMENTS)),
    }
)
doubts = nn.Parameter(torch.zeros(4))


# %% losses
def survival(log_rate, time, happened):
    """Negative log-likelihood of an exponential waiting time, cut off where nothing had happened yet."""
    return (log_rate.exp() * time - happened * log_rate).mean()


def losses(features, rows):
    return torch.stack(
        [
            F.smooth_l1_loss(heads["yield"](features), product[rows]),
            F.cross_entropy(heads["regime"](features), regime[rows]),
            survival(heads["alarm"](features).squeeze(1).clamp(-6, 4), alarm[rows], seen[rows]),
            F.mse_loss(heads["clean"](features), clean[rows]),
        ]
    )


# %% training: three groups, from a quarter of the way on four
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in heads.parameters() if p.ndim == 2], "weight_decay": 0.05},
        {"params": [p for p in heads.parameters() if p.ndim == 1]},
        {"params": [doubts], "lr": 1e-2},
    ],
    lr=2e-3,
    weight_decay=0.0,
    fused=True,
)
trunk.requires_grad_(False)
running = torch.zeros(4)
for step in range(STEPS):  # the training loop
    if step == HEADS_ONLY:
        trunk.requires_grad_(True)
        optimizer.add_param_group({"params": list(trunk.parameters()), "lr": 5e-4, "weight_decay": 0.01})
    if step >= HEADS_ONLY:
        optimizer.param_groups[-1]["lr"] = 5e-4 * (
            0.55 + 0.45 * math.cos(math.pi * (step - HEADS_ONLY) / (STEPS - HEADS_ONLY))
        )
    rows = torch.randint(ROWS, (BATCH,))
    readings = torch.addcmul(clean[rows], noise_level, torch.randn(BATCH, INSTRUMENTS))
    each = losses(trunk(readings), rows)
    optimizer.zero_grad()
    (each * (-doubts).exp() + doubts).sum().backward()
    optimizer.step()
    running.lerp_(each.detach(), 0.05)

# %% result
for name, value in zip(heads, running.tolist(), strict=True):
    print(f"{name:>8}  {value:.3f}")
