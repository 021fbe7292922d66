"""Names crops in autumn with labels from spring only: an encoder and a critic that guesses the season."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

CROPS = 9
SIDE = 24


def fields(amount, shades, haze):
    crops = torch.randint(CROPS, (amount,))
    images = torch.randn(amount, 3, SIDE, SIDE).mul_(0.4).add_(shades[crops][:, :, None, None])
    return images * (1 - haze) + haze, crops


def block(inputs, outputs, stride):
    return [
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="fields of each season in a batch")
    parser.add_argument("--confusion", type=float, default=0.1)
    args = parser.parse_args()

    torch.manual_seed(31)
    shades = torch.rand(CROPS, 3)
    spring, labels = fields(1536, shades, 0.0)
    autumn, hidden = fields(1536, shades, 0.3)

    encoder = nn.Sequential(
        *block(3, 24, 1),
        *block(24, 48, 2),
        *block(48, 48, 1),
        *block(48, 48, 1),
        *block(48, 96, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    classifier = nn.Linear(96, CROPS)
    critic = nn.Sequential(nn.Linear(96, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    learned = [*encoder.parameters(), *classifier.parameters()]
    encoder_optimizer = torch.optim.AdamW(learned, lr=1e-3, fused=True)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.5, 0.999), fused=True)
    season = torch.cat([torch.zeros(args.rows, 1), torch.ones(args.rows, 1)])

    for step in range(1, args.steps + 1):  # the training loop
        ours = torch.randint(len(spring), (args.rows,))
        theirs = torch.randint(256, len(autumn), (args.rows,))
        features = encoder(torch.cat([spring[ours], autumn[theirs]]))

        critic_loss = F.binary_cross_entropy_with_logits(critic(features.detach()), season)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        critic.requires_grad_(False)
        confused = F.binary_cross_entropy_with_logits(critic(features), 1 - season)
        crop_loss = F.cross_entropy(classifier(features[: args.rows]), labels[ours])
        encoder_optimizer.zero_grad()
        (crop_loss + args.confusion * confused).backward()
        encoder_optimizer.step()
        critic.requires_grad_(True)

        if step % 100 == 0:
            encoder.eval()
            with torch.inference_mode():
                right = (classifier(encoder(autumn[:128])).argmax(1) == hidden[:128]).float().mean()
            encoder.train()
            print(f"{step:4} crops {crop_loss.item():.3f} autumn {right:.0%}")


if __name__ == "__main__":
    main()
