"""Guesses how strong both players of an online chess game are, from their moves and the time they took."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

PIECES, SQUARES = 6, 64
MOVES = PIECES * SQUARES  # which piece goes to which square, from 1; 0 is no move
CODES = 500  # of openings, A00 to E99
MEAN, SPREAD = 1500.0, 350.0
GAMES = 24  # in a batch


def play_games(amount, rng):
    """Makes up games in which strong players move faster and keep more to the middle."""
    strengths = rng.standard_normal((amount, 2)).clip(-2.5, 3.5)
    lengths = rng.normal(64, 6, amount).clip(46, 82).astype(int)
    games = []
    for strength, length in zip(strengths, lengths, strict=False):
        skill = strength[np.arange(length) % 2]
        squares = (32 + 5 * skill + 13 * rng.standard_normal(length)).clip(0, SQUARES - 1).astype(int)
        moves = 1 + rng.integers(0, PIECES, length) * SQUARES + squares
        seconds = rng.gamma(2.0, np.exp(1.2 - 0.2 * skill))
        games.append((moves, np.log1p(seconds), strength, int(rng.integers(CODES))))
    return games


def stack_games(games, headroom):
    """Puts games of about the same length together, which start at the first column."""
    columns = max(len(moves) for moves, *_ in games) + headroom
    moves = torch.zeros(len(games), columns, dtype=torch.long)
    clocks = torch.zeros(len(games), columns)
    for row, (played, seconds, _, _) in enumerate(games):
        moves[row, : len(played)] = torch.from_numpy(played)
        clocks[row, : len(played)] = torch.from_numpy(seconds)
    return {
        "moves": moves,
        "clocks": clocks,
        "strengths": torch.from_numpy(np.stack([strength for *_, strength, _ in games])).float(),
        "opening": torch.tensor([opening for *_, opening in games]),
    }


def make_batches(games, headroom):
    games = sorted(games, key=lambda game: len(game[0]))
    return [stack_games(games[at : at + GAMES], headroom) for at in range(0, len(games), GAMES)]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, seen):
        b, t, w = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class Rater(nn.Module):
    """An opinion about both players after each move, and the mean of these.

    With `openings`, how far the players of each opening are off the average is learnt as well.
    """

    def __init__(self, columns, openings=0, width=96, depth=2, heads=4):
        super().__init__()
        self.move = nn.Embedding(MOVES + 1, width, padding_idx=0)
        self.clock = nn.Linear(1, width)
        self.place = nn.Parameter(0.02 * torch.randn(columns, width))
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)
        self.openings = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(openings)])

    def forward(self, moves, clocks, opening):
        seen = moves > 0
        x = self.move(moves) + self.clock(clocks.unsqueeze(2)) + self.place[: moves.shape[1]]
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, seen[:, None, None, :])
        running = self.head(self.norm(x))
        weight = seen.unsqueeze(2).float()
        guess = (running * weight).sum(1) / weight.sum(1)
        if len(self.openings):
            offsets = torch.stack(list(self.openings))
            guess = guess + offsets[opening % len(offsets)]
        return guess, running


@torch.no_grad()
def within(model, batch, points):
    guess, _ = model(batch["moves"], batch["clocks"], batch["opening"])
    off = (guess - batch["strengths"]).abs() * SPREAD
    return (off <= points).float().mean()


@torch.no_grad()
def mean_error(model, batches):
    model.eval()
    errors = []
    for batch in batches:
        guess, _ = model(batch["moves"], batch["clocks"], batch["opening"])
        errors.append((guess - batch["strengths"]).abs().mean() * SPREAD)
    model.train()
    return torch.stack(errors).mean().item()


def note(path, line):
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--openings", type=int, default=0, help="openings with offsets of their own")
    parser.add_argument("--opinions", type=int, default=0, help="opinions of each batch that go to a file")
    parser.add_argument("--brackets", type=int, default=0, help="shares within 25, 50, ... points")
    parser.add_argument("--headroom", type=int, default=0, help="columns behind the longest game")
    args = parser.parse_args()

    torch.manual_seed(64)
    rng = np.random.default_rng(64)
    batches = make_batches(play_games(40 * GAMES, rng), args.headroom)
    held_out = make_batches(play_games(4 * GAMES, rng), args.headroom)
    columns = max(batch["moves"].shape[1] for batch in batches + held_out)

    model = Rater(columns, args.openings)
    trunk = [p for name, p in model.named_parameters() if not name.startswith("openings.")]
    optimizers = [torch.optim.AdamW(trunk, lr=6e-4, weight_decay=0.02, fused=True)]
    if args.openings:
        optimizers.append(torch.optim.Adam(model.openings.parameters(), lr=2e-3))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda done: min(1.0, (done + 1) / 25))

    shares = torch.zeros(args.brackets)
    order = []
    with tempfile.TemporaryDirectory() as folder:
        opinions = Path(folder) / "opinions.tsv"
        for step in range(args.steps):  # the training loop
            if not order:
                order = torch.randperm(len(batches)).tolist()
            batch = batches[order.pop()]

            guess, running = model(batch["moves"], batch["clocks"], batch["opening"])
            loss = F.smooth_l1_loss(guess, batch["strengths"])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            warm_up.step()

            if args.brackets:
                now = [within(model, batch, 25 * (bracket + 1)) for bracket in range(args.brackets)]
                shares.lerp_(torch.stack(now), 0.05)

            if args.opinions:
                width = running.shape[1]
                scores = (running.detach().flatten(0, 1)[: args.opinions] * SPREAD + MEAN).tolist()
                for number, score in enumerate(scores):
                    game, ply = divmod(number, width)
                    for player, rating in zip(("white", "black"), score, strict=False):
                        note(opinions, f"{step}\t{game}\t{ply}\t{player}\t{rating:.0f}")

            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f}")

        if args.brackets:
            print("within", " ".join(f"{share:.2f}" for share in shares.tolist()))
        print(f"off by {mean_error(model, held_out):.0f} points")
