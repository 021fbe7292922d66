"""Fits a multilayer perceptron to a table of numbers.

python examples/tabular_mlp.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def make_table(num_rows: int, num_columns: int, generator: torch.Generator) -> TensorDataset:
    """Makes rows whose target is a smooth function of products of columns, plus noise."""
    rows = torch.randn(num_rows, num_columns, generator=generator)
    mix = torch.randn(num_columns, 8, generator=generator) / num_columns**0.5
    hidden = rows @ mix
    target = torch.sin(2 * hidden[:, 0]) + hidden[:, 1] * hidden[:, 2] + 0.5 * hidden[:, 3:].abs().sum(1)
    target += 0.1 * torch.randn(num_rows, generator=generator)
    return TensorDataset(rows, (target - target.mean()) / target.std())


@torch.no_grad()
def explained_variance(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Returns R squared over the loader's rows."""
    model.eval()
    squared_error = total = 0.0
    for rows, target in loader:
        rows, target = rows.to(device), target.to(device)
        squared_error += ((model(rows).squeeze(1) - target) ** 2).sum().item()
        total += (target**2).sum().item()
    model.train()
    return 1 - squared_error / total


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--columns", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-weights", type=Path, help="where to save the final weights")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    table = make_table(args.rows, args.columns, torch.Generator().manual_seed(args.seed))
    train_set, val_set = random_split(table, [0.9, 0.1])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.workers)
    val_loader = DataLoader(val_set, args.batch_size, num_workers=args.workers)
    print(f"{len(train_set)} rows to train on, {len(val_set)} to validate on")

    model = nn.Sequential(
        nn.Linear(args.columns, 256),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 1),
    ).to(device)
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        running_loss = 0.0
        for rows, target in train_loader:
            rows, target = rows.to(device), target.to(device)
            loss = criterion(model(rows).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        scheduler.step()
        train_loss = running_loss / len(train_loader)
        r2 = explained_variance(model, val_loader, device)
        print(f"epoch {epoch + 1}: train loss {train_loss:.4f}, validation R2 {r2:.4f}")

    if args.save_weights:
        torch.save(model.state_dict(), args.save_weights)


if __name__ == "__main__":
    main()
