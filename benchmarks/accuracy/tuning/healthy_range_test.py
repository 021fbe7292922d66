"""A learning-rate range test of a sparse autoencoder: the rate grows until the loss explodes."""

import argparse
import math

import torch


class SparseCode(torch.nn.Module):
    def __init__(self, inputs, codes):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(inputs, codes), torch.nn.Linear(codes, inputs)

    def forward(self, x):
        code = self.encoder(x).relu()
        return self.decoder(code), code.mean()


class RangeTest:
    def __init__(self, model, low, high, steps):
        self.model, self.steps = model, steps
        self.optimizer = torch.optim.SGD(model.parameters(), lr=low, momentum=0.9, fused=True)
        growth = (high / low) ** (1 / steps)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, growth)
        self.curve = []

    def step(self, x):
        restored, activity = self.model(x)
        loss = torch.nn.functional.mse_loss(restored, x) + 1e-3 * activity
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self, activations, rows):
        smooth = 0.0
        for number in range(self.steps):  # the training loop
            first = number * rows % len(activations)
            loss = self.step(activations[first : first + rows])
            smooth = 0.9 * smooth + 0.1 * loss
            self.curve.append((self.scheduler.get_last_lr()[0], smooth / (1 - 0.9 ** (number + 1))))
            if not math.isfinite(loss):
                break
            self.scheduler.step()
        return min(self.curve, key=lambda pair: pair[1])[0] / 10


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=180)
    args = cli.parse_args()
    torch.manual_seed(51)
    activations = torch.randn(512 * 8, 256)
    test = RangeTest(SparseCode(256, 1536), 1e-5, 1e-1, args.steps)
    print("suggested rate", test.run(activations, 512))


if __name__ == "__main__":
    main()
