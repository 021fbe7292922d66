"""A user's script around Lightning's `Trainer`: an autoencoder; with `--manual`, two optimizers by hand."""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        print(
            f"epoch {self.current_epoch}: validation loss {self.trainer.callback_metrics['val_loss']:.6f}"
        )

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class ManualAutoEncoder(AutoEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        loss = self.loss(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.encoder.parameters(), lr=1e-3),
            torch.optim.SGD(self.decoder.parameters(), lr=1e-2),
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--manual", action="store_true")
    parser.add_argument("--output", default="out")
    parser.add_argument(
        "--callback", metavar="RUNS", help="measure with DiagnoseCallback, into this folder"
    )
    args = parser.parse_args()

    L.seed_everything(0, verbose=False)
    rows = torch.randn(1024, 4) @ torch.randn(4, 64)
    train_loader = DataLoader(TensorDataset(rows[:896]), batch_size=16, shuffle=True)
    val_loader = DataLoader(TensorDataset(rows[896:]), batch_size=16)
    model = ManualAutoEncoder() if args.manual else AutoEncoder()
    callbacks = []
    if args.callback:
        from diagnose.callbacks.lightning import DiagnoseCallback

        callbacks.append(DiagnoseCallback(run_dir=args.callback, quiet=True))
    trainer = L.Trainer(
        callbacks=callbacks,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        num_sanity_val_steps=2,
        default_root_dir=args.output,
    )
    trainer.fit(model, train_loader, val_loader)
    trainer.save_checkpoint(f"{args.output}/final.ckpt")


if __name__ == "__main__":
    main()
