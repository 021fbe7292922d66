"""Pretrains an encoder of network flows without labels: two corrupted views must agree (Barlow Twins)."""

import argparse

import torch
from torch import nn


class Flows:
    """Counters of flows; a view of a row has some of its fields swapped with those of other rows."""

    def __init__(self, amount=16384, fields=60, sources=12):
        hidden = torch.randn(amount, sources)
        clean = torch.tanh(hidden @ torch.randn(sources, fields) / 3)
        self.rows = clean + 0.1 * torch.randn(amount, fields)

    def view(self, batch, share):
        other = torch.randint(len(self.rows), batch.shape)
        return torch.where(torch.rand(batch.shape) < share, self.rows.gather(0, other), batch)

    def draw(self, size, share=0.3):
        batch = self.rows[torch.randint(len(self.rows), (size,))]
        return self.view(batch, share), self.view(batch, share)


def dense(before, after):
    return nn.Sequential(nn.Linear(before, after, bias=False), nn.BatchNorm1d(after), nn.ReLU(inplace=True))


class Encoder(nn.Module):
    def __init__(self, fields=60, width=512, code=256):
        super().__init__()
        self.body = nn.Sequential(dense(fields, width), dense(width, width), dense(width, width))
        self.projector = nn.Linear(width, code, bias=False)
        self.norm = nn.BatchNorm1d(code, affine=False)

    def forward(self, rows):
        return self.norm(self.projector(self.body(rows)))


class Agreement(nn.Module):
    def __init__(self, code=256, weight=0.005):
        super().__init__()
        weights = torch.full((code, code), weight).fill_diagonal_(1.0)
        self.register_buffer("weights", weights)
        self.register_buffer("wanted", torch.eye(code))

    def forward(self, left, right):
        shared = left.T @ right / len(left)
        return ((shared - self.wanted).square() * self.weights).sum()


class Pretraining:
    def __init__(self, steps, size=256):
        self.steps, self.size = steps, size
        self.flows, self.encoder, self.agreement = Flows(), Encoder(), Agreement()
        self.optimizer = torch.optim.AdamW(self.encoder.parameters(), lr=1e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, max(1, steps))

    def update(self):
        left, right = self.flows.draw(self.size)
        loss = self.agreement(self.encoder(left), self.encoder(right))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def losses(self):
        for _ in range(self.steps):
            yield self.update()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(90)
    sums = torch.zeros(())
    for step, loss in enumerate(Pretraining(args.steps).losses(), 1):  # the training loop
        sums += loss
        if step % 50 == 0:
            print(f"step {step}, mean loss of the last fifty {sums.item() / 50:.3f}")
            sums.zero_()


if __name__ == "__main__":
    main()
