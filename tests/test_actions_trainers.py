"""Actions in loops that a trainer runs: what comes out is what comes out without them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from diagnose.actions.base import Action
from diagnose.actions.channels_last import ChannelsLast
from diagnose.actions.fused_optimizer import FusedOptimizer
from diagnose.actions.gc_freeze import GcFreeze
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.micro_batching import MicroBatching
from diagnose.actions.set_threads import SetThreads
from diagnose.core.trial import Safety
from tests.toggled import assert_close, assert_equal, images, tuned, weights

THREADS = torch.get_num_threads() + 1
EACH = [
    pytest.param(action, value, id=type(action).__name__)
    for action, value in (
        (FusedOptimizer(), None),
        (GcFreeze(), None),
        (ChannelsLast(), None),
        (SetThreads(), THREADS),
        (LoaderWorkers(), 1),
    )
]
each_action = pytest.mark.parametrize("action, value", EACH)


class Images(Dataset[dict[str, torch.Tensor]]):
    """Small images with a label, as a dictionary."""

    def __init__(self, num: int = 64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.pixels = torch.randn(num, 3, 8, 8, generator=generator)
        self.label = torch.randint(2, (num,), generator=generator)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixels": self.pixels[index], "labels": self.label[index]}


class Small(nn.Module):
    """Without dropout, whose masks depend on the layout in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1))
        self.head = nn.Linear(4 * 8 * 8, 2)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(pixels).flatten(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def assert_as_alone(fit: Callable[[], nn.Module], action: Action, value: int | None) -> None:
    """A loop ends with the same weights, bit for bit where the action is exact."""
    alone = weights(fit())
    with tuned(action, value=value):
        ours = weights(fit())
    (assert_equal if action.safety is Safety.EXACT else assert_close)(ours, alone)


@each_action
def test_a_trainer_of_hugging_face(action: Action, value: int | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def fit() -> nn.Module:
        transformers.set_seed(0)
        model = Small()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine",
            adam_epsilon=1e-3,
            optim="adamw_torch",
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        transformers.Trainer(model=model, args=arguments, train_dataset=Images()).train()
        return model

    assert_as_alone(fit, action, value)


@pytest.fixture(scope="module")
def lightning() -> Any:
    """Imported before a test could be blamed for what it replaces in torch."""
    return pytest.importorskip("lightning")


@each_action
def test_a_trainer_of_lightning(action: Action, value: int | None, lightning: Any, tmp_path: Path) -> None:
    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.small = Small()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = self.small(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def fit() -> nn.Module:
        lightning.seed_everything(0, verbose=False)
        model = Module()
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, DataLoader(Images(), batch_size=4, shuffle=True))
        return model

    assert_as_alone(fit, action, value)


@pytest.mark.parametrize("action, value", [*EACH, pytest.param(MicroBatching(), 2, id="MicroBatching")])
def test_averages_schedules_scalers_and_copies(action: Action, value: int | None) -> None:
    """The copies are made while the action is in force, and compute what the model does."""

    def fit() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Small().body, nn.Flatten(), Small().head)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        twins = nn.ModuleList()
        for _ in range(2):
            for step, (image, label) in enumerate(images(64)):
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(model(image), label)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                average.update_parameters(model)
                if step in (5, 6, 7, 8):
                    model.eval()
                    with torch.no_grad():
                        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                            assert torch.equal(twin(image), model(image))
                            twins.append(twin)
                    model.train()
        return nn.ModuleList([model, average, twins])

    assert_as_alone(fit, action, value)


@pytest.mark.parametrize("action, value", [(MicroBatching(), 2), (LoaderWorkers(), 1)])
def test_a_model_that_is_compiled_whole(action: Action, value: int | None) -> None:
    def fit() -> nn.Module:
        torch.manual_seed(0)
        model = Small()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
        for _ in range(3):
            for batch in DataLoader(Images(), batch_size=4, shuffle=True):
                nn.functional.cross_entropy(compiled(batch["pixels"])["logits"], batch["labels"]).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model

    assert_as_alone(fit, action, value)
