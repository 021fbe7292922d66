"""A trainer with callbacks, in the manner of the large libraries."""

import dataclasses
import logging

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


@dataclasses.dataclass
class Arguments:
    max_steps: int = 140
    logging_steps: int = 20
    max_grad_norm: float = 1.0
    warmup_steps: int = 10


class Callback:
    def on_step_end(self, trainer):
        pass


class LogLoss(Callback):
    def on_step_end(self, trainer):
        if trainer.state["step"] % trainer.args.logging_steps == 0:
            logging.getLogger("trainer").warning(
                "step %s: %.4f", trainer.state["step"], trainer.state["loss"]
            )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Embedding(100, 64), nn.TransformerEncoder(layer, 2)
        self.classify = nn.Linear(64, 100)

    def forward(self, input_ids, labels):
        logits = self.classify(self.encoder(self.embed(input_ids)))
        return {
            "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


class Trainer:
    def __init__(self, model, args, dataset, callbacks):
        self.model, self.args, self.dataset, self.callbacks = model, args, dataset, callbacks
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / args.warmup_steps))
        self.state = {"step": 0, "loss": 0.0}

    def compute_loss(self, inputs):
        return self.model(**inputs)["loss"]

    def training_step(self, inputs):
        self.model.train()
        loss = self.compute_loss(inputs)
        loss.backward()
        return loss.detach()

    def train(self):
        for step in range(self.args.max_steps):  # the training loop
            loss = self.training_step(self.dataset[step % len(self.dataset)])
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.state = {"step": step + 1, "loss": loss}
            for callback in self.callbacks:
                callback.on_step_end(self)


torch.manual_seed(0)
ids = torch.randint(100, (8, 16, 48))
Trainer(Model(), Arguments(), [{"input_ids": i, "labels": i.roll(1, 1)} for i in ids], [LogLoss()]).train()
