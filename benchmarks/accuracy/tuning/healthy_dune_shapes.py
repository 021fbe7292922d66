# GAN that draws height maps of dunes. Hinge loss, lazy gradient penalty, averaged generator, a look at it now and then.
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--latent", type=int, default=64)
args = parser.parse_args()

torch.manual_seed(17)
SIDE = 16


def dunes(count):
    y, x = torch.meshgrid(torch.linspace(0, 1, SIDE), torch.linspace(0, 1, SIDE), indexing="ij")
    angle = torch.rand(count, 1, 1) * 0.8 - 0.4
    phase = torch.rand(count, 1, 1) * 6.28
    ridge = torch.sin(12 * (x + angle * y) + phase + 0.8 * torch.sin(5 * y))
    return (ridge.clamp(-0.2, 1) * (0.6 + 0.4 * torch.rand(count, 1, 1))).unsqueeze(1)


generator = nn.Sequential(
    nn.Linear(args.latent, 64 * 16),
    nn.Unflatten(1, (64, 4, 4)),
    nn.ReLU(),
    nn.ConvTranspose2d(64, 48, 4, stride=2, padding=1),
    nn.ReLU(),
    nn.ConvTranspose2d(48, 32, 4, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 1, 3, padding=1),
)
critic = nn.Sequential(
    nn.Conv2d(1, 32, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(32, 64, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(64, 96, 3, padding=1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(96 * 16, 1),
)
mean_generator = [p.detach().clone() for p in generator.parameters()]
generator_tensors = [p.detach() for p in generator.parameters()]

real_dunes = dunes(6000)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.0, 0.99), fused=True)
opt_c = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.0, 0.99), fused=True)
names = [name for name, _ in generator.named_parameters()]
fixed = torch.randn(args.batch, args.latent)
scores = torch.zeros(2)

for step in range(args.steps):  # the training loop
    pick = torch.randint(0, len(real_dunes), (args.batch,))
    real = real_dunes[pick]

    # critic; real and fake go through it together
    with torch.no_grad():
        fake = generator(torch.randn(args.batch, args.latent))
    verdict_real, verdict_fake = critic(torch.cat([real, fake])).chunk(2)
    loss_c = F.relu(1 - verdict_real).mean() + F.relu(1 + verdict_fake).mean()
    opt_c.zero_grad()
    loss_c.backward()
    opt_c.step()

    # generator; the critic's own gradients are not needed here
    critic.requires_grad_(False)
    loss_g = -critic(generator(torch.randn(args.batch, args.latent))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    critic.requires_grad_(True)
    torch._foreach_lerp_(mean_generator, generator_tensors, 0.005)

    # lazy R1 penalty, every 16th step
    if step % 16 == 15:
        real.requires_grad_(True)
        slope = torch.autograd.grad(critic(real).sum(), real, create_graph=True)[0]
        opt_c.zero_grad()
        (8 * slope.square().sum((1, 2, 3)).mean()).backward()
        opt_c.step()

    scores += torch.stack([loss_c.detach(), loss_g.detach()])
    if step % 50 == 49:
        with torch.no_grad():
            drawn = torch.func.functional_call(generator, dict(zip(names, mean_generator)), (fixed,))
        roughness = (drawn[..., 1:] - drawn[..., :-1]).abs().mean()
        c, g = (scores / 50).tolist()
        print(f"{step + 1}: critic {c:.3f} generator {g:.3f} roughness {roughness.item():.3f}")
        scores.zero_()
