"""Predicts how many minutes each stop of a parcel van's tour will take."""

import argparse
import gc
import random
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

LONGEST = 32


@dataclass(slots=True)
class Tour:
    stops: torch.Tensor
    minutes: torch.Tensor
    hours: list[list[float]]


def make_tours(amount, slots):
    random.seed(5)
    customers = [[60.0 * random.random() for _ in range(slots)] for _ in range(50)]
    tours = []
    for _ in range(amount):
        length = random.randint(LONGEST - 3, LONGEST)
        stops = torch.randn(length, 5)
        legs = (stops[:, :2] - stops[:, :2].roll(1, 0)).norm(dim=1)
        minutes = legs + 0.3 * stops[:, 2].abs() + 0.1 * torch.randn(length)
        tours.append(Tour(stops, minutes, random.choices(customers, k=length)))
    return tours


class Packer:
    """Makes a batch of tours: stops, minutes and which of the stops there are."""

    def __init__(self, slots):
        self.slots = slots

    def opening(self, tours, longest):
        rows = []
        for tour in tours:
            hours = [[minutes / 60 for minutes in slots] for slots in tour.hours]
            hours += [[0.0] * self.slots] * (longest - len(hours))
            rows.append(hours)
        return torch.tensor(rows).mean(2, keepdim=True)

    def __call__(self, tours):
        stops = pad_sequence([tour.stops for tour in tours], batch_first=True)
        minutes = pad_sequence([tour.minutes for tour in tours], batch_first=True)
        lengths = torch.tensor([len(tour.stops) for tour in tours])
        real = torch.arange(stops.shape[1]) < lengths[:, None]
        opening = self.opening(tours, stops.shape[1]) if self.slots else torch.zeros(*minutes.shape, 1)
        return torch.cat([stops, opening], 2), minutes, real


class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        b, t, w = x.shape
        parts = self.project(self.norm_a(x)).chunk(3, -1)
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.merge(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.inner(self.norm_b(x))


class TourNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.order = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        self.layers = nn.ModuleList([Layer(width) for _ in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, stops, real):
        x = self.embed(stops) + self.order[: stops.shape[1]]
        for layer in self.layers:
            x = layer(x, real[:, None, None, :])
        whole = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return self.head(x).squeeze(-1), whole


class Trainer:
    def __init__(self, model, loader, args):
        self.model, self.loader, self.args = model, loader, args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
        self.anchors = []

    def batches(self):
        while True:
            yield from self.loader

    @torch.no_grad()
    def emphasis(self, whole, errors):
        """Weighs tours up that lie near those which were predicted badly."""
        nearest = torch.full((len(whole),), 100.0)
        for anchor in self.anchors:
            nearest = torch.minimum(nearest, (whole - anchor).pow(2).sum(1))
        worst = errors.topk(min(self.args.anchors, len(errors))).indices
        self.anchors.extend(whole[worst].split(1))
        return 1 + torch.exp(-nearest)

    def train_step(self, stops, minutes, real):
        predicted, whole = self.model(stops, real)
        errors = F.smooth_l1_loss(predicted, minutes, reduction="none")
        errors = (errors * real).sum(1) / real.sum(1)
        if self.args.anchors:
            errors = errors * self.emphasis(whole.detach(), errors.detach())
        loss = errors.mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self):
        feed = islice(self.batches(), self.args.steps)
        for step, batch in enumerate(feed, 1):  # the training loop
            loss = self.train_step(*batch)
            if step * self.args.tidy % 100 < self.args.tidy:
                gc.collect()
            if step % 50 == 0:
                print(f"{step:5d}  {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--slots", type=int, default=0, help="slots of a customer's opening hours")
    parser.add_argument("--anchors", type=int, default=0, help="tours of a batch to remember")
    parser.add_argument("--tidy", type=int, default=0, help="how often memory is tidied, in 100 steps")
    args = parser.parse_args()
    torch.manual_seed(5)
    tours = make_tours(960, args.slots)
    loader = DataLoader(tours, batch_size=48, shuffle=True, drop_last=True, collate_fn=Packer(args.slots))
    Trainer(TourNet(), loader, args).fit()


if __name__ == "__main__":
    main()
