# Power of every turbine of a wind farm from the weather forecast: one shared network for the site, and for
# each turbine its own gain and offset by wind direction.

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

TURBINES, SECTORS, WEATHER, WIDTH = 240, 24, 48, 448
HOURS, ROWS = 6144, 256


class Farm(nn.Module):
    def __init__(self, bands=0):
        super().__init__()
        self.encode = nn.Linear(WEATHER, WIDTH)
        self.input_norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.site = nn.Linear(WIDTH, TURBINES)
        self.gain = nn.ParameterList(torch.ones(SECTORS) for _ in range(TURBINES))
        self.offset = nn.ParameterList(torch.zeros(SECTORS) for _ in range(TURBINES))
        self.bands = []
        if bands:
            size, rest = divmod(WIDTH, bands)
            self.bands = [size + 1] * rest + [size] * (bands - rest)

    def normalised(self, h):
        if not self.bands:
            return self.input_norm(h)
        done = []
        for band in torch.split(h, self.bands, dim=1):
            centred = band - band.mean(1, keepdim=True)
            spread = centred.square().mean(1, keepdim=True)
            done.append(centred * torch.rsqrt(spread + 1e-3))
        return torch.cat(done, 1) * self.input_norm.weight + self.input_norm.bias

    def forward(self, weather, sectors):
        h = self.normalised(F.gelu(self.encode(weather)))
        for layer, norm in zip(self.hidden, self.norms, strict=False):
            h = h + F.gelu(layer(norm(h)))
        gain = torch.stack(tuple(self.gain))
        offset = torch.stack(tuple(self.offset))
        return self.site(h) * (sectors @ gain.T) + sectors @ offset.T


class TrustAdam(torch.optim.Optimizer):
    """Adam whose update of a tensor is as large as the tensor, as in LAMB."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = torch.zeros_like(p)
                state["step"] += 1
                state["mean"].mul_(first).add_(p.grad, alpha=1 - first)
                state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                mean = state["mean"] / (1 - first ** state["step"])
                square = state["square"] / (1 - second ** state["step"])
                update = mean / (square.sqrt() + group["eps"])
                trust = p.norm().clamp(0.1, 10.0) / update.norm().clamp_min(1e-6)
                p.sub_(update * trust * group["lr"])


def warm_cosine(steps):
    def factor(step):
        return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

    return factor


def replayed(curve):
    # the rates of last year's run, noisy as they were logged
    def factor(step):
        smooth, level = [], curve[0]
        for value in curve:
            level = 0.98 * level + 0.02 * value
            smooth.append(level)
        return smooth[min(step, len(smooth) - 1)] / max(smooth)

    return factor


def watch(layer, units, seen):
    for unit in range(units):

        def keep(module, inputs, output, unit=unit):
            seen[unit] = output.detach()[:, unit].mean()

        layer.register_forward_hook(keep)


def make_history():
    weather = torch.randn(HOURS, WEATHER)
    wind = torch.rand(HOURS, 1) * 2 * math.pi
    centres = torch.arange(SECTORS) * (2 * math.pi / SECTORS)
    sectors = torch.softmax(6 * torch.cos(wind - centres), 1)
    output = torch.sigmoid(weather @ torch.randn(WEATHER, TURBINES) * 0.15)
    return weather, sectors, output * (1 + 0.1 * sectors @ torch.randn(SECTORS, TURBINES))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--trust", type=int, default=0, help="turbines' tensors with a trust ratio")
    parser.add_argument("--curve", type=int, default=0, help="points of a recorded schedule to replay")
    parser.add_argument("--watch", type=int, default=0, help="units to watch for dying")
    parser.add_argument("--bands", type=int, default=0, help="feature bands to normalise by themselves")
    args = parser.parse_args()

    torch.manual_seed(77)
    weather, sectors, power = make_history()
    farm = Farm(args.bands)

    own = [*farm.gain, *farm.offset]
    known = {id(p) for p in own}
    matrices = [p for p in farm.parameters() if p.ndim == 2]
    vectors = [p for p in farm.parameters() if p.ndim < 2 and id(p) not in known]
    groups = [
        {"params": matrices, "weight_decay": 1e-2},
        {"params": vectors + own[args.trust :], "weight_decay": 0.0},
    ]
    optimizers = [torch.optim.AdamW(groups, lr=1e-3, fused=True)]
    if args.trust:
        optimizers.append(TrustAdam(own[: args.trust], lr=1e-3))

    shape = warm_cosine(args.steps)
    if args.curve:
        noise = torch.rand(args.curve).tolist()
        shape = replayed([0.5 + 0.5 * value for value in noise])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizers[0], shape)

    seen, step, order = {}, 0, torch.randperm(HOURS)
    while step < args.steps:  # the training loop
        if len(order) < ROWS:
            order = torch.randperm(HOURS)
        rows, order = order[:ROWS], order[ROWS:]
        if args.watch:
            watch(farm.hidden[0], args.watch, seen)
        loss = F.smooth_l1_loss(farm(weather[rows], sectors[rows]), power[rows])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        schedule.step()
        step += 1
        if step % 50 == 0:
            quiet = sum(abs(level.item()) < 1e-3 for level in seen.values())
            print(f"{step:5d}  loss {loss.item():.4f}  rate {schedule.get_last_lr()[0]:.2e}  quiet {quiet}")


if __name__ == "__main__":
    main()
