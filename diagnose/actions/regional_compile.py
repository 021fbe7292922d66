"""The repeated blocks of the model, compiled"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diagnose.actions._blocks import blocks
from diagnose.actions._checkpointed import SLOT
from diagnose.actions._compiled import GRAPHS_OF_A_KIND, Compiler, Slot, going_back_twice
from diagnose.actions._module_hooks import hooks_of
from diagnose.actions._routes import refuse_compiled
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

COLD_S = 20.0
WARM_S = 1.0
"""What it takes where nothing is in the compiler's cache on disk, and where something is, hopefully this:
four blocks took 18.6 s and 0.1 s."""


class RegionalCompile(Action):
    """
    ## What it does
    Compiles the blocks that the model repeats, such as the layers of a transformer, with `torch.compile`:
    blocks of one kind share one graph, so the wait does not grow with the depth. A model that repeats
    nothing is compiled whole. Only training is compiled. Dropout draws the numbers that it drew before.

    ## When it takes effect
    At the next step, which waits for the compiler: on a CPU 20 s where nothing is in its cache on disk, a
    tenth of a second where all is. Turning it off and on again costs nothing.

    ## When it cannot help
    Blocks with a break in their graph, such as a decision that depends on a tensor's values; with hooks; a
    script that compiles itself, or differentiates a gradient once more. Large products of matrices, which
    are as fast as they get. A run that ends soon. A machine without a C++ compiler, or a GPU without
    Triton.

    ## Hazards
    A new shape, another number of threads or another precision compiles anew: after more than six graphs
    for blocks of one kind it is undone, in its trial and later. Where the script's loops tell how many
    steps are left, it is not tried if these would win less than compiling takes. A block that fails to
    compile runs as it was written, from that very call on; so does one on which the script registers hooks,
    for as long as they are there.
    """

    safety = Safety.ROUNDING
    order = 70
    settle_steps = 3
    touches = "model"
    hangs_on = ("blocks",)

    def check(self, job: Job) -> None:
        refuse_compiled(job)
        if job.facts.get("graph", {}).get("second_order"):
            raise CannotApply("the script differentiates a gradient once more, which compiled code cannot")
        for same in blocks(job).values():
            for block in same:
                if any(hooks_of(block)):
                    raise CannotApply(f"{type(block).__name__} has hooks, which a graph may lose")
        refuse_without_compiler(job.device)

    def start_up_s(self, job: Job) -> float:
        try:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir
        except ImportError:  # another torch keeps it elsewhere
            return COLD_S
        folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(), "fxgraph")
        return WARM_S if folder.is_dir() and any(folder.iterdir()) else COLD_S

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Compiler]:
        """See `Action.prepare`. Yields what knows how long compiling took (`seconds`, `num_graphs`)."""
        compiler = Compiler(blocks(job).values())
        with going_back_twice():
            yield compiler

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        prepared.failure.refuse_again()
        try:
            _fill(prepared.slots)
            yield
        finally:
            _clear(prepared.slots)

    def why_not_stay(self, prepared: Any) -> str:
        if prepared.failure.reason:
            return str(prepared.failure.reason)
        if prepared.num_graphs <= GRAPHS_OF_A_KIND * prepared.num_kinds:
            return ""
        return (
            f"it compiles again and again: {prepared.num_graphs} graphs of {prepared.num_kinds} kinds of"
            f" blocks, {prepared.seconds:.0f} s so far; shapes or settings change from step to step"
        )

    def state(self, job: Job) -> Any:
        modules = (module for model in job.models for module in model.modules())
        return {id(module): slot for module in modules if (slot := vars(module).get(SLOT)) is not None}


def _fill(slots: Iterable[Slot]) -> None:
    for slot in slots:
        block = slot.block
        if block is not None and vars(block).get(SLOT) is not None:
            raise CannotApply(f"{type(block).__name__} has been compiled in the meantime")
        if block is not None:
            setattr(block, SLOT, slot)


def _clear(slots: Iterable[Slot]) -> None:
    for slot in slots:
        block = slot.block
        if block is not None and vars(block).get(SLOT) is slot:
            delattr(block, SLOT)


def refuse_without_compiler(device: str) -> None:
    """Raises `CannotApply` if graphs cannot be made into code for this device here."""
    import torch._dynamo.config
    from torch._dynamo.eval_frame import is_dynamo_supported
    from torch._functorch import config
    from torch._inductor import cpp_builder

    if not is_dynamo_supported():
        raise CannotApply("torch.compile does not work with this Python")
    if torch._dynamo.config.disable:
        raise CannotApply("torch.compile is switched off")
    if not hasattr(config, "force_non_lazy_backward_lowering"):
        raise CannotApply("this torch has no torch._functorch.config.force_non_lazy_backward_lowering")
    if device == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise CannotApply("Triton is not installed, or does not know this GPU")
        return
    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError as error:
        raise CannotApply("there is no C++ compiler") from error
