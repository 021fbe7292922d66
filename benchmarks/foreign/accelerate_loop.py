"""A user's loop around Hugging Face Accelerate, with its gradient accumulation and clipping."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--output", default="weights.pt")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    rows = torch.randn(2048, 32)
    target = (rows[:, :1] * rows[:, 1:2]).sign()
    model: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=128)
    loader = DataLoader(TensorDataset(rows, target), batch_size=32, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(args.epochs):
        total = 0.0
        for batch, expected in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.soft_margin_loss(model(batch), expected)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.6f}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.output)


if __name__ == "__main__":
    main()
