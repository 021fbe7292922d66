"""Next-move model over chess openings (a small decoder-only transformer)."""

from __future__ import annotations

import argparse
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    moves: int = 512
    plies: int = 48
    width: int = 96
    heads: int = 4
    depth: int = 6
    batch: int = 5
    lean: int = 0  # the first blocks keep no activations
    book: int = 0
    archive: int = 0


class Block(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.heads = cfg.heads
        self.norm1, self.norm2 = nn.LayerNorm(cfg.width), nn.LayerNorm(cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.width, 4 * cfg.width), nn.GELU(), nn.Linear(4 * cfg.width, cfg.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Player(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.move = nn.Embedding(cfg.moves, cfg.width)
        self.ply = nn.Parameter(torch.randn(cfg.plies, cfg.width) * 0.02)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.moves)

    def forward(self, moves: Tensor) -> Tensor:
        x = self.move(moves) + self.ply
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i < self.cfg.lean else block(x)
        return self.head(self.norm(x))


class OpeningBook:
    """Remembers how often each move followed which, ply by ply, so that we can say what has been covered."""  # noqa: E501

    def __init__(self, depth: int) -> None:
        self.seen: list[dict[int, int]] = [{} for _ in range(depth + 1)]
        self.lately: deque[int] = deque(maxlen=2000)

    def add(self, line: list[int]) -> None:
        before = 0
        for ply, move in enumerate(line):
            counts = self.seen[ply]
            counts[move] = counts.get(move, 0) + 1
            if (move - before) % 6 == 1:
                self.lately.append(ply)
            before = move

    def covered(self) -> int:
        return sum(len(counts) for counts in self.seen)


class Trainer:
    def __init__(self, cfg: Config, folder: Path) -> None:
        self.cfg, self.folder = cfg, folder
        self.model = Player(cfg)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        g = torch.Generator().manual_seed(1)
        start = torch.randint(cfg.moves, (4000, 1), generator=g)
        self.games = (start + torch.randint(1, 6, (4000, cfg.plies + 1), generator=g).cumsum(1)) % cfg.moves
        self.lines = self.games.tolist()
        self.book = OpeningBook(cfg.plies)
        # what the archive holds besides the model: positions for the opponent pool
        self.pool = torch.randn(cfg.archive, 1 << 18)

    def step(self, moves: Tensor) -> Tensor:
        logits = self.model(moves[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), moves[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def save(self, step: int) -> None:
        state = {"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["pool"] = self.pool
        torch.save(state, self.folder / f"player{step % 2}.pt")

    def fit(self, steps: int) -> None:
        for step in range(1, steps + 1):  # the training loop
            index = torch.randint(len(self.games), (self.cfg.batch,))
            loss = self.step(self.games[index])
            for k in range(self.cfg.book):
                self.book.add(self.lines[(step * 31 + k) % len(self.lines)])
            if self.cfg.archive and step % 6 == 0:
                self.save(step)
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.3f} book {self.book.covered()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lean", type=int, default=0, help="blocks that keep no activations")
    parser.add_argument("--book", type=int, default=0, help="lines entered into the opening book per step")
    parser.add_argument(
        "--archive", type=int, default=0, help="MiB of opponent pool archived with the model"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(Config(lean=args.lean, book=args.book, archive=args.archive), Path(folder)).fit(args.steps)


if __name__ == "__main__":
    main()
