"""Keeps the activations of fewer blocks, and computes them again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn

from diagnose.actions._block_costs import cheapest, measure_blocks
from diagnose.actions._checkpointed import SLOT, checkpointed, is_fit, refuse_unfit
from diagnose.actions._memory import refuse_unless_short
from diagnose.actions._routes import models_with_weights
from diagnose.actions._splitting import refuse_sharded
from diagnose.actions._watch import unwrapped
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

SHARES = (30, 60, 100)
"""Per cent of the blocks' activations to be freed."""

LISTS = (nn.ModuleList, nn.Sequential)


class ActivationCheckpointing(Action):
    """Frees the activations of chosen blocks after the forward pass; the backward pass computes them again.

    ## What it does
    Each repeated block of the model is measured once: the bytes that it keeps for the backward pass and the
    time of its forward pass. Of all choices of blocks that free the wanted part of the bytes, the one that
    costs the least time is taken. These blocks then keep their inputs only. The second computation sees the
    random numbers of the first, Python's and NumPy's too, and batch norm counts no batch twice.

    ## When it takes effect
    At the next call of the model. Keys of `state_dict`, copies and pickles of the model are not changed.

    ## When it cannot help
    It never makes a step faster by itself, so it is tried only while memory is short: less than a tenth is
    left at the peak. What it frees lets a larger batch or another action fit: named with `--only`, or in a
    file for `--apply`, it stays for that, unless steps take twice as long. It is refused for blocks that
    are compiled or carry hooks of the script's.

    ## What was measured
    Losses, parameters and buffers are equal bit for bit, with dropout and batch norm. The bytes freed were
    those predicted, to the byte. The step gets longer by the forward time of the chosen blocks.
    """

    safety = Safety.EXACT
    order = 60
    excludes = frozenset({"regional-compile", "oom-replay"})
    touches = "model"
    frees_memory = True
    hangs_on = ("blocks",)

    def check(self, job: Job) -> None:
        refuse_unless_short(job)
        for model in models_with_weights(job):
            refuse_sharded(model)
            if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
                raise CannotApply("the model is compiled: its graph calls no block by itself")
        found = [each for model in models_with_weights(job) for each in repeated_blocks(unwrapped(model))]
        if not any(is_fit(block) for _, block in found):
            for name, block in found:
                refuse_unfit(block, name)
            raise CannotApply("no model has blocks that follow each other in a list")

    def values(self, job: Job) -> Sequence[int | None]:
        return SHARES

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        """Measures the blocks in one step beside the training, and chooses among them."""
        chosen = [ref(block) for block in _chosen(job, value or SHARES[0])]
        if not chosen:
            raise CannotApply("the blocks keep nothing beyond their inputs")
        yield chosen

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        with checkpointed(_fit(prepared)):
            yield

    def state(self, job: Job) -> Any:
        return {
            (index, name): vars(module).get(SLOT, "torch's own")
            for index, model in enumerate(job.models)
            for name, module in model.named_modules()
        }


def _chosen(job: Job, share: int) -> list[nn.Module]:
    """Returns the blocks that free so many per cent of the activations in the least time."""
    chosen: list[nn.Module] = []
    for model in models_with_weights(job):
        costs = measure_blocks(job, model, blocks_of(model))
        wanted = sum(cost.num_bytes for cost in costs) * share // 100
        chosen += [cost.block for cost in cheapest(costs, wanted)]
    return chosen


def _fit(blocks: Sequence[ref[nn.Module]]) -> list[nn.Module]:
    """Returns those of the blocks that are still there.

    Raises:
        CannotApply: If one has come to be unfit.
    """
    alive = [block for each in blocks if (block := each()) is not None]
    for block in alive:
        refuse_unfit(block, type(block).__name__)
    return alive


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of one model that can be checkpointed."""
    return [block for _, block in repeated_blocks(unwrapped(model)) if is_fit(block)]


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the members of the outermost lists of modules, by name: a model's blocks follow each other.

    In a list of lists, a network's stages, they are the members of the inner ones.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        if not isinstance(child, LISTS) or all(isinstance(member, LISTS) for member in child):
            found += [(f"{name}.{inner}", block) for inner, block in repeated_blocks(child)]
        elif len(child) > 1:
            found += [(f"{name}.{index}", member) for index, member in child.named_children()]
    return found
