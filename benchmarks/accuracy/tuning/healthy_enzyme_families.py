"""Sorts enzymes into families by their sequences, batches of similar lengths, with validation."""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

ACIDS = 21
FAMILIES = 16


class Enzymes(Dataset):
    def __init__(self, amount, seed):
        generator = torch.Generator().manual_seed(seed)
        motifs = torch.randint(1, ACIDS, (FAMILIES, 6), generator=torch.Generator().manual_seed(0))
        self.families = torch.randint(FAMILIES, (amount,), generator=generator)
        self.lengths = torch.randint(40, 161, (amount,), generator=generator).tolist()
        self.chains = []
        for family, length in zip(self.families.tolist(), self.lengths, strict=False):
            chain = torch.randint(1, ACIDS, (length,), generator=generator)
            start = int(torch.randint(length - 6, (), generator=generator))
            chain[start : start + 6] = motifs[family]
            self.chains.append(chain)

    def __len__(self):
        return len(self.chains)

    def __getitem__(self, index):
        return self.chains[index], self.families[index]


class ByLength(Sampler):
    """Batches of about as many residues each, of chains about as long."""

    def __init__(self, lengths, residues):
        self.lengths, self.residues = lengths, residues

    def __iter__(self):
        about = [length + random.random() * 4 for length in self.lengths]
        order = sorted(range(len(about)), key=about.__getitem__)
        batches, batch = [], []
        for chain in order:
            if batch and (len(batch) + 1) * self.lengths[chain] > self.residues:
                batches.append(batch)
                batch = []
            batch.append(chain)
        batches.append(batch)
        random.shuffle(batches)
        return iter(batches)


def collate(samples):
    chains, families = zip(*samples, strict=False)
    return nn.utils.rnn.pad_sequence(chains, batch_first=True), torch.stack(families)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, mask):
        rows, length, width = x.shape
        mixed = self.mix(self.norm(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.inner(x)


class FamilyNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.acids = nn.Embedding(ACIDS, width, padding_idx=0)
        self.places = nn.Embedding(160, width)
        self.layers = nn.ModuleList([Layer(width, 4), Layer(width, 4)])
        self.top = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, FAMILIES))

    def forward(self, chains):
        there = chains != 0
        x = self.acids(chains) + self.places.weight[: chains.shape[1]]
        for layer in self.layers:
            x = layer(x, there[:, None, None])
        weights = there.unsqueeze(2) / there.sum(1)[:, None, None]
        return self.top((x * weights).sum(1))


class Experiment:
    def __init__(self, steps):
        self.steps, self.step, self.epoch = steps, 0, 0
        train, held = Enzymes(800, seed=1), Enzymes(64, seed=2)
        self.loader = DataLoader(
            train,
            batch_sampler=ByLength(train.lengths, residues=1400),
            collate_fn=collate,
            num_workers=2,
            persistent_workers=True,
        )
        order = sorted(range(len(held)), key=held.lengths.__getitem__)
        self.held = [collate([held[chain] for chain in order[at : at + 16]]) for at in range(0, 64, 16)]
        self.model = FamilyNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def train_epoch(self):
        for chains, families in self.loader:  # the training loop
            loss = F.cross_entropy(self.model(chains), families)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step == self.steps:
                break
        return loss.item()

    @torch.inference_mode()
    def validate(self):
        self.model.eval()
        right = sum((self.model(chains).argmax(1) == families).sum() for chains, families in self.held)
        self.model.train()
        return right.item() / 64

    def run(self):
        while self.step < self.steps:
            self.epoch += 1
            loss = self.train_epoch()
            print(f"epoch {self.epoch}: loss {loss:.3f}, right {self.validate():.0%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(12)
    random.seed(12)
    Experiment(args.steps).run()


if __name__ == "__main__":
    main()
