"""Course project: a recurrent model that writes verse, with torch.compile.

The poems come from a random rhyme grammar, so that there is nothing to download.
"""

import argparse
import collections

import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F

SYLLABLES = 160
LENGTH = 32


def write_poems(count, seed):
    """Lines of 8 syllables, the last of which rhymes with that of the line before."""
    g = torch.Generator().manual_seed(seed)
    poems = torch.randint(3, SYLLABLES, (count, LENGTH + 1), generator=g)
    ends = torch.arange(7, LENGTH + 1, 8)
    rhyme = torch.randint(3, SYLLABLES - 1, (count, (len(ends) + 1) // 2), generator=g)
    poems[:, ends] = rhyme.repeat_interleave(2, 1)[:, : len(ends)] + torch.arange(len(ends)) % 2
    return poems


LEVELS = collections.defaultdict(float)


@torch.compiler.disable  # a dictionary that grows made the compiler start over
def note(place, level):
    LEVELS[place] = 0.9 * LEVELS[place] + 0.1 * float(level)


class Poet(nn.Module):
    def __init__(self, dim=128, watched=0):
        super().__init__()
        self.tokens = nn.Embedding(SYLLABLES, dim)
        self.mix = nn.Linear(2 * dim, 2 * dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, SYLLABLES)
        self.watched = watched

    def advance(self, place, word, state):
        gate, new = self.mix(torch.cat([word, state], 1)).chunk(2, 1)
        state = torch.lerp(state, torch.tanh(new), torch.sigmoid(gate))
        if place < self.watched:
            # does the memory saturate early in a poem?
            note(place, state.detach().abs().mean())
        return state

    def forward(self, x):
        words = self.tokens(x)
        state = torch.zeros_like(words[:, 0])
        states = []
        for place in range(x.shape[1]):
            state = self.advance(place, words[:, place], state)
            states.append(state)
        return self.head(self.norm(torch.stack(states, 1)))


class SharpLoss(nn.Module):
    """Cross entropy of logits that are sharpened a little in each stage of the training."""

    def __init__(self):
        super().__init__()
        self.stage = 0

    def forward(self, logits, targets):
        logits = logits * (1 + 0.001 * self.stage)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument(
        "--watch",
        type=int,
        default=0,
        help="syllables of a poem, from its start, after which the memory is watched",
    )
    p.add_argument("--stages", type=int, default=0, help="how often in 100 steps the logits are sharpened")
    args = p.parse_args()

    torch.manual_seed(7)
    # the compiler gave up after 8 and said to raise this
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    poems = write_poems(4000, 7)
    model = Poet(watched=args.watch)
    criterion = SharpLoss()
    # the machines in the lab have no C++ compiler
    run = torch.compile(model, backend="aot_eager")
    judge = torch.compile(criterion, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    total = torch.zeros(())

    for step in range(1, args.steps + 1):  # the training loop
        batch = poems[torch.randint(len(poems), (args.batch,))]
        criterion.stage = step * args.stages // 100
        loss = judge(run(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % 50 == 0:
            print(f"step {step}: loss {total.item() / 50:.3f}", flush=True)
            total.zero_()
    if LEVELS:
        print("memory:", " ".join(f"{v:.2f}" for v in LEVELS.values()))


if __name__ == "__main__":
    main()
