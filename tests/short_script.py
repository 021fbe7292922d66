"""A small script as users write one, whose memory may run out once, and what a run of it came to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROWS, BATCH, EPOCHS = 56, 4, 6
STEPS = ROWS // BATCH * EPOCHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the script goes.

    Attributes:
        num_workers: Of its loader.
        norm: Whether its model has batch norm and dropout.
        noisy: Whether its samples are random.
        short_in: Where its memory runs out once: `forward`, `backward`, `step`, or nowhere.
        short_at: At which step.
        survives: Whether it catches that, and goes on with the next batch.
    """

    num_workers: int = 0
    norm: bool = False
    noisy: bool = False
    short_in: str = ""
    short_at: int = 0
    survives: bool = True


@dataclass(slots=True)
class Ending:
    """What a run of the script came to.

    Attributes:
        samples: Indices in the order in which the script got them.
        weights: Parameters and buffers.
        random: State of torch's generator.
        left: All that an action might have left changed, by name.
        error: What the script raised.
        notes: What of ours failed, in words.
        told: What the tuner said.
        left_in_the_job: Routes and callbacks.
    """

    samples: list[int] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    random: torch.Tensor | None = None
    left: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    notes: list[str] = field(default_factory=list)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    left_in_the_job: list[Any] = field(default_factory=list)


class Rows(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Images that tell their index."""

    def __init__(self, noisy: bool) -> None:
        self.noisy = noisy
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(ROWS, 3, 6, 6, generator=generator)
        self.labels = torch.randint(2, (ROWS,), generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.rand(1) if self.noisy else 0.0
        return index, self.images[index] + noise, self.labels[index]


class Memory:
    """Runs out when it is told to, once."""

    def __init__(self) -> None:
        self.short_in = ""

    def needed(self, where: str) -> None:
        if where == self.short_in:
            self.short_in = ""
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Allocates(torch.autograd.Function):
    """Needs memory in both passes."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, memory: Memory) -> torch.Tensor:
        ctx.memory = memory
        memory.needed("forward")
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.memory.needed("backward")
        return gradient, None


class Block(nn.Module):
    """A block such as models repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        return image_NCHW + self.inner(image_NCHW)


class Net(nn.Module):
    """A model that gives something to do to most actions."""

    def __init__(self, memory: Memory, norm: bool) -> None:
        super().__init__()
        self.memory = memory
        beside = [nn.BatchNorm2d(4), nn.Dropout(0.1)] if norm else []
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(), Block(), *beside)
        self.head = nn.Linear(4 * 6 * 6, 2)

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        hidden = Allocates.apply(self.body(image_NCHW), self.memory)
        return self.head(hidden.flatten(1))


def run(script: Script, ends: Callable[[], None] = lambda: None) -> Ending:
    """Runs the script, as users write one.

    Args:
        script: Which.
        ends: Called when its loop has ended, however it did.
    """
    torch.manual_seed(0)
    ending, memory = Ending(), Memory()
    model = Net(memory, script.norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    optimizer.register_step_pre_hook(lambda *_: memory.needed("step"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    loader = DataLoader(Rows(script.noisy), batch_size=BATCH, shuffle=True, num_workers=script.num_workers)
    try:
        step = 0
        for _ in range(EPOCHS):
            for index, image, label in loader:
                ending.samples += index.tolist()
                memory.short_in = script.short_in if step == script.short_at else ""
                step += 1
                try:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(image), label).backward()
                    optimizer.step()
                    scheduler.step()
                except torch.OutOfMemoryError:
                    if not script.survives:
                        raise
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what the script ends with)
        ending.error = error.with_traceback(None)
    ending.weights = [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
    ending.random = torch.get_rng_state()
    ends()
    ending.left = left_by_an_action(model, optimizer, loader)
    return ending


def left_by_an_action(model: nn.Module, optimizer: Any, loader: Any) -> dict[str, Any]:
    """Returns what actions change, comparably between two runs of the script."""
    parameters = list(model.parameters())
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = [sorted((k, v.stride()) for k, v in optimizer.state[p].items()) for p in parameters]
    return {
        "attributes of modules": [sorted(vars(module)) for module in model.modules()],
        "attributes of the optimizer": sorted(vars(optimizer)),
        "attributes of the loader": sorted(vars(loader)),
        "settings of the optimizer": groups,
        "state of the optimizer": state,
        "layout of weights": [p.stride() for p in parameters],
        "hooks of weights": [
            len(hooks or ())
            for p in parameters
            for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        ],
        "hooks of the optimizer": [
            len(hooks) for name, hooks in sorted(vars(optimizer).items()) if name.endswith("_hooks")
        ],
        "the collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "threads": torch.get_num_threads(),
    }
