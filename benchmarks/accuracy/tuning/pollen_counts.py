# Counts pollen grains on microscope slides by regressing a density map. Two ranks:
#   torchrun --nproc-per-node=2 pollen_counts.py
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SIZE = 48


def grain(rng, radius):
    r = int(radius) + 2
    y, x = np.mgrid[-r : r + 1, -r : r + 1]
    edge = np.hypot(x, y * rng.uniform(0.8, 1.25)) - radius
    return (1 / (1 + np.exp(2 * edge)) * rng.uniform(0.5, 1.0)).astype(np.float32)


def make_slides(n, rng):
    slides = rng.normal(0.1, 0.03, (n, 1, SIZE, SIZE)).astype(np.float32)
    density = np.zeros((n, 1, SIZE, SIZE), np.float32)
    stock = [grain(rng, rng.uniform(2, 5)) for _ in range(64)]
    for i in range(n):
        for _ in range(rng.poisson(6)):
            g = stock[rng.integers(64)]
            h, w = g.shape
            y, x = rng.integers(0, SIZE - h), rng.integers(0, SIZE - w)
            slides[i, 0, y : y + h, x : x + w] += g
            density[i, 0, y : y + h, x : x + w] += g / g.sum()
    return slides, density, stock


def conv(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = conv(width, width)
        self.b = conv(width, width)

    def forward(self, x):
        return x + self.b(self.a(x))


class Counter(nn.Module):
    def __init__(self, width=12, depth=7):
        super().__init__()
        self.stem = conv(1, width, 2)
        self.body = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x):
        return F.softplus(F.pixel_shuffle(self.head(self.body(self.stem(x))), 2) - 4)


class ActivationWatch:
    """Quantiles of the activations of some channels of each block, for the dashboard (rank 0 only)."""

    def __init__(self, net, channels):
        self.levels = torch.tensor([0.01, 0.25, 0.5, 0.75, 0.99])
        self.channels = channels
        self.latest = {}
        for name, module in net.named_modules():
            if isinstance(module, Residual):
                module.register_forward_hook(lambda m, i, out, name=name: self.see(name, out))

    @torch.no_grad()
    def see(self, name, out):
        self.latest[name] = [
            torch.quantile(out[:, c % out.shape[1]].flatten(), self.levels) for c in range(self.channels)
        ]


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(3)
        self.rng = np.random.default_rng(40 + self.rank)
        slides, density, self.stock = make_slides(1500, self.rng)
        self.slides, self.density = torch.from_numpy(slides), torch.from_numpy(density)
        net = Counter()
        if args.watch and self.rank == 0:
            self.watch = ActivationWatch(net, args.watch)
        kwargs = dict(bucket_cap_mb=args.bucket_kb / 1024) if args.bucket_kb else {}
        self.net = nn.parallel.DistributedDataParallel(
            net, broadcast_buffers=False, gradient_as_bucket_view=True, **kwargs
        )
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)

    def paste(self, slides, density):
        """copy-paste augmentation: more grains, turned and rescaled, onto each slide"""
        slides, density = slides.numpy(), density.numpy()
        for slide, target in zip(slides[:, 0], density[:, 0]):
            for _ in range(self.args.paste):
                g = np.rot90(self.stock[self.rng.integers(64)], self.rng.integers(4))
                if self.rng.random() < 0.5:
                    g = g[:, ::-1]
                h, w = g.shape
                y, x = self.rng.integers(0, SIZE - h), self.rng.integers(0, SIZE - w)
                g = g * self.rng.uniform(0.6, 1.1)
                slide[y : y + h, x : x + w] = np.maximum(slide[y : y + h, x : x + w], g)
                target[y : y + h, x : x + w] += g / g.sum()
        return torch.from_numpy(slides), torch.from_numpy(density)

    def batch(self):
        pick = torch.randint(len(self.slides), (self.args.batch,))
        slides, density = self.slides[pick], self.density[pick]
        if self.args.paste:
            slides, density = self.paste(slides, density)
        return slides, density

    def fit(self):
        running = torch.zeros(())
        for step in range(1, self.args.steps + 1):  # the training loop
            slides, density = self.batch()
            out = self.net(slides)
            count = (out.sum((1, 2, 3)) - density.sum((1, 2, 3))).abs().mean()
            loss = F.mse_loss(out, density, reduction="sum") / len(out) + 0.01 * count
            loss.backward()
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)
            running.lerp_(loss.detach(), 0.05)
            if step % 40 == 0 and self.rank == 0:
                print(f"step {step}: loss {running:.3f}, off by {count:.1f} grains")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument(
        "--watch",
        type=int,
        default=0,
        metavar="CHANNELS",
        help="channels of each block whose activations go to the dashboard",
    )
    p.add_argument("--bucket-kb", type=int, default=0, help="size of DDP's buckets (0: as DDP likes it)")
    p.add_argument("--paste", type=int, default=0, metavar="N", help="grains pasted onto each slide")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    try:
        Trainer(args).fit()
    finally:
        dist.destroy_process_group()
