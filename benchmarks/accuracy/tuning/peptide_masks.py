"""Masked language model on peptides: the network fills in residues that were hidden."""

import argparse
import collections
import math
import os
import random
import subprocess
import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
PAD, MASK, FIRST = 0, 1, 2
HYDRO = dict(
    zip(
        RESIDUES,
        (
            1.8,
            2.5,
            -3.5,
            -3.5,
            2.8,
            -0.4,
            -3.2,
            4.5,
            -3.9,
            3.8,
            1.9,
            -3.5,
            -1.6,
            -3.5,
            -4.5,
            -0.8,
            -0.7,
            4.2,
            -0.9,
            -1.3,
        ),
    )
)
SCALE = [0.0, 0.0] + [HYDRO[r] for r in RESIDUES]


def make_peptides(count, rng):
    motifs = ["".join(rng.choices(RESIDUES, k=rng.randint(4, 9))) for _ in range(120)]
    out = []
    for _ in range(count):
        length, text = rng.randint(40, 72), ""
        while len(text) < length:
            text += rng.choice(motifs)
        out.append([FIRST + RESIDUES.index(r) for r in text[:length]])
    return out


def make_batches(peptides, size, length):
    """Peptides of like length go together, padded to the longest of them, or all to `length`."""
    batches = []
    peptides = sorted(peptides, key=len)
    for at in range(0, len(peptides) - size + 1, size):
        part = peptides[at : at + size]
        longest = max(max(map(len, part)), length)
        tokens = torch.full((size, longest), PAD)
        for row, p in zip(tokens, part):
            row[: len(p)] = torch.tensor(p)
        batches.append(tokens)
    return batches


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.n2(x))


class PeptideModel(nn.Module):
    def __init__(self, dim=96, depth=3, heads=4, longest=1024):
        super().__init__()
        self.embed = nn.Embedding(FIRST + len(RESIDUES), dim, padding_idx=PAD)
        place = torch.arange(longest)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, dim, 2) / dim)
        self.register_buffer("place", torch.cat([place.sin(), place.cos()], 1))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, FIRST + len(RESIDUES))

    def forward(self, tokens):
        mask = (tokens != PAD)[:, None, None, :]
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def profile_of(tokens):
    """the hydrophobicity of stretches of eight residues"""
    return [sum(map(SCALE.__getitem__, tokens[i : i + 8])) for i in range(0, len(tokens), 8)]


def nearest_decoy(tokens, tries, rng):
    """Of `tries` shuffled versions of the peptide the one most like it in hydrophobicity."""
    wanted, best, least = profile_of(tokens), tokens, float("inf")
    for _ in range(tries):
        decoy = tokens[:]
        rng.shuffle(decoy)
        far = sum((a - b) ** 2 for a, b in zip(profile_of(decoy), wanted))
        if far < least:
            best, least = decoy, far
    return best


def corrupt(tokens, decoys, rng):
    """Hide 15 % of the residues: behind the mask, or (with decoys) behind what a decoy has there."""
    hidden = (torch.rand(tokens.shape) < 0.15) & (tokens != PAD)
    if not decoys:
        return tokens.masked_fill(hidden, MASK), hidden
    rows = []
    for row in tokens.tolist():
        peptide = [t for t in row if t != PAD]
        rows.append(nearest_decoy(peptide, decoys, rng) + [PAD] * (len(row) - len(peptide)))
    return torch.where(hidden, torch.tensor(rows), tokens), hidden


class CallGraph:
    """Who calls whom, `depth` callers up: the source of the flame graph in the lab's weekly report."""

    def __init__(self, depth):
        self.depth = depth
        self.edges = collections.Counter()

    def __call__(self, frame, event, arg):
        if event == "call" or event == "c_call":
            path = [arg.__name__] if event == "c_call" else []
            for _ in range(self.depth):
                if frame is None:
                    break
                code = frame.f_code
                path.append(f"{os.path.basename(code.co_filename)}:{code.co_name}:{frame.f_lineno}")
                frame = frame.f_back
            self.edges[";".join(reversed(path))] += 1


def used_kb(folders):
    return sum(
        int(subprocess.run(["du", "-sk", f], capture_output=True, text=True).stdout.split()[0])
        for f in folders
    )


def train(args):
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    batches = make_batches(make_peptides(3200, rng), args.batch, args.fixed_length)
    model = PeptideModel()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1, (s + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * s / args.steps))
    )

    scratch = tempfile.TemporaryDirectory()
    folders = []
    for job in range(args.quota_dirs):
        folders.append(os.path.join(scratch.name, f"job{job}"))
        os.mkdir(folders[-1])

    graph = None
    if args.callgraph:
        graph = CallGraph(args.callgraph)
        sys.setprofile(graph)

    order = []
    for step in range(args.steps):  # the training loop
        if folders and used_kb(folders) > 50_000_000:  # the quota of the group; past it the job gets killed
            print("over quota, stopping")
            break
        if not order:
            order = rng.sample(range(len(batches)), len(batches))
        clean = batches[order.pop()]
        tokens, hidden = corrupt(clean, args.decoys, rng)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), clean.masked_fill(~hidden, -100).flatten())
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} lr {sched.get_last_lr()[0]:.1e}")

    if graph:
        sys.setprofile(None)
        for path, count in graph.edges.most_common(3):
            print(count, path)
    scratch.cleanup()


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--seed", type=int, default=17)
    p.add_argument("--batch", type=int, default=14)
    p.add_argument(
        "--fixed-length", type=int, default=0, help="pad every batch to this length (for the exporter)"
    )
    p.add_argument("--decoys", type=int, default=0, help="shuffled decoys tried for each peptide")
    p.add_argument("--quota-dirs", type=int, default=0, help="scratch folders that count towards the quota")
    p.add_argument("--callgraph", type=int, default=0, help="levels of callers kept for the flame graph")
    train(p.parse_args())
