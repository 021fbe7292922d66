"""Learns when to bluff: a betting game of three rounds against a stubborn opponent, by policy gradients."""

import argparse
import multiprocessing

import torch
from torch import nn
from torch.distributions import Categorical

CARDS, ROUNDS, MOVES = 20, 3, 3  # fold, call, raise


class Player(nn.Module):
    def __init__(self, width=320):
        super().__init__()
        self.card = nn.Embedding(CARDS, 64)
        self.body = nn.Sequential(
            nn.Linear(64 + 3, width),
            nn.ELU(),
            nn.Linear(width, width),
            nn.ELU(),
            nn.Linear(width, MOVES + 1),
        )

    def forward(self, card, table):
        out = self.body(torch.cat([self.card(card), table], 1))
        return Categorical(logits=out[:, :MOVES]), out[:, MOVES]


def play(player, hands):
    """Plays `hands` hands at once: what each was worth, how likely its moves were, what was expected."""
    mine, theirs = torch.randint(CARDS, (2, hands))
    stake, open_ = torch.ones(hands), torch.ones(hands)
    gain = torch.zeros(hands)
    chances, hopes, spreads = [], [], []
    for turn in range(ROUNDS):
        table = torch.stack([stake / 4, open_, torch.full((hands,), turn / ROUNDS)], 1)
        policy, hope = player(mine, table)
        move = policy.sample()
        chances.append(policy.log_prob(move) * open_)
        hopes.append(hope)
        spreads.append(policy.entropy())
        folds = (move == 0).float() * open_
        gain = gain - folds * stake
        open_ = open_ - folds
        stake = stake + (move == 2).float() * open_
        gives_up = ((theirs < 8) & (move == 2) & (torch.rand(hands) < 0.5)).float() * open_
        gain = gain + gives_up * stake
        open_ = open_ - gives_up
    gain = gain + open_ * stake * torch.sign(mine - theirs)
    return gain, torch.stack(chances), torch.stack(hopes), torch.stack(spreads)


def objective(player, hands):
    gain, chances, hopes, spreads = play(player, hands)
    better = (gain - hopes.detach()) / 3
    loss = -(better * chances).mean() + 0.05 * (gain - hopes).square().mean() - 0.01 * spreads.mean()
    return loss, gain.mean()


def referee(line, rounds):
    """Keeps the player's rating: plays out a season of duels from the gains it is told."""
    rating = 1500.0
    while (gain := line.recv()) is not None:
        for number in range(rounds):
            expected = 1 / (1 + 10 ** ((1500 + number % 7 - rating) / 400))
            rating += 0.001 * ((gain > 0) - expected)
        line.send(rating)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hands", type=int, default=1024)
    parser.add_argument("--tables", type=int, default=1, help="tables that the hands are dealt to, in turn")
    parser.add_argument("--season", type=int, default=0, help="duels in the referee's season")
    args = parser.parse_args()

    here = None
    if args.season:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        context.Process(target=referee, args=(there, args.season), daemon=True).start()

    torch.manual_seed(21)
    player = Player()
    optimizer = torch.optim.Adam(player.parameters(), lr=5e-4, fused=True)
    rating = float("nan")
    for step in range(1, args.steps + 1):  # the training loop
        gains = []
        for _ in range(args.tables):
            loss, gain = objective(player, max(1, args.hands // args.tables))
            (loss / args.tables).backward()
            gains.append(gain)
        optimizer.step()
        optimizer.zero_grad()
        if here is not None:
            here.send(gains[-1].item())
            rating = here.recv()
        if step % 50 == 0:
            mean = torch.stack(gains).mean().item()
            print(f"step {step}: loss {loss.item():.3f}, gain per hand {mean:+.3f}, rating {rating:.0f}")


if __name__ == "__main__":
    main()
