"""Blood sugar over the next hour, from four hours of a sensor; noisy gradients, as the clinics' contract asks.

The contract also knows an accountant, a process of its own, that says how much privacy is spent by now.
"""

import argparse
import math
import multiprocessing

import numpy as np
import torch
from torch import nn

PAST, AHEAD = 40, 4


def accountant(pipe, orders):
    """Sums up the loss of privacy, at so many orders, and tells the smallest."""
    spent = [0.0] * orders
    while (rate := pipe.recv()) is not None:
        for place in range(orders):
            order = 2 + place
            log_sum = -math.inf
            for k in range(120):
                pick = math.lgamma(order + 121) - math.lgamma(k + 1) - math.lgamma(order + 121 - k)
                term = pick + k * math.log(rate) + k * (k - 1) / 8
                high = max(log_sum, term)
                log_sum = high + math.log(math.exp(log_sum - high) + math.exp(term - high))
            spent[place] += log_sum / (order - 1) * 1e-6
        pipe.send(min(spent))


class Accounts:
    def __init__(self, orders):
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=accountant, args=(theirs, orders), daemon=True)
        self.process.start()

    def enter(self, rate):
        self.pipe.send(rate)
        return self.pipe.recv()

    def close(self):
        self.pipe.send(None)
        self.process.join()


class Forecaster(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.memory = nn.GRU(3, hidden, batch_first=True)
        self.ahead = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, AHEAD))

    def forward(self, past):
        states, _ = self.memory(past)
        return self.ahead(states)


def patients(count):
    """Meals and insulin drive a leaky sum."""
    rng = np.random.default_rng(17)
    meals = rng.exponential(1.0, (count, PAST + AHEAD)) * (rng.random((count, PAST + AHEAD)) < 0.15)
    insulin = np.roll(meals, 2, 1) * rng.uniform(0.6, 1.2, (count, 1))
    sugar = np.zeros_like(meals)
    for t in range(1, PAST + AHEAD):
        sugar[:, t] = 0.95 * sugar[:, t - 1] + meals[:, t - 1] - 0.7 * insulin[:, t - 1]
    seen = np.stack([sugar, meals, insulin], -1)[:, :PAST]
    coming = np.stack([sugar[:, 1 + k : 1 + k + PAST] for k in range(AHEAD)], -1)
    return torch.tensor(seen, dtype=torch.float32), torch.tensor(coming, dtype=torch.float32)


def disturb(parameters, sigma):
    nn.utils.clip_grad_norm_(parameters, 1.0)
    grads = [p.grad for p in parameters]
    torch._foreach_add_(grads, [torch.randn_like(g) for g in grads], alpha=sigma)


def main(args):
    torch.manual_seed(17)
    past, coming = patients(4000)
    net = Forecaster(args.hidden)
    parameters = list(net.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3, fused=True)
    accounts = Accounts(args.orders) if args.orders else None
    errors = []
    knee, spent = 1.0, 0.0
    for step in range(args.steps):  # the training loop
        picks = torch.randint(len(past), (args.patients,))
        miss = net(past[picks]) - coming[picks]
        if args.knee:
            # nine in ten of the errors so far are below the knee, where the loss turns linear
            errors.append(miss.detach().flatten()[: args.knee].abs().numpy())
            knee = max(0.05, float(np.quantile(np.concatenate(errors), 0.9)))
        loss = nn.functional.huber_loss(miss, torch.zeros_like(miss), delta=knee)
        optimizer.zero_grad()
        loss.backward()
        disturb(parameters, args.sigma)
        if accounts:
            spent = accounts.enter(args.patients / len(past))
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} spent {spent:.3g}")
    if accounts:
        accounts.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--patients", type=int, default=56)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sigma", type=float, default=1e-3)
    parser.add_argument(
        "--orders", type=int, default=0, help="orders at which the accountant keeps the books"
    )
    parser.add_argument(
        "--knee", type=int, default=0, help="find the knee of the loss by so many errors of a step"
    )
    main(parser.parse_args())
