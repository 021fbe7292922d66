"""Compiled blocks that give themselves up rather than fail."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn

from diagnose.actions._blame import raised_by_handler
from diagnose.actions._careful import Failure, in_short
from diagnose.actions._module_hooks import hooks_of

GRAPHS_OF_A_KIND = 6
"""Graphs that blocks of one kind may need: the first, and one for the block whose input needs no gradient;
as many where a short last batch makes that size a variable, and for what changes once. More means that
something changes all the time: each compiles for seconds, and after eight torch gives up."""


class Compiler:
    """Torch's compiler, as all blocks of one action use it.

    Args:
        kinds: The blocks; those of one kind share their graphs.

    Attributes:
        slots: A slot for each block.
        num_kinds: Kinds of blocks.
        failure: Why blocks run as they were, if they do.
        num_graphs: Graphs compiled so far.
        seconds: Time that compiling has taken.
    """

    def __init__(self, kinds: Iterable[Iterable[nn.Module]]) -> None:
        self.slots: list[Slot] = []
        self.num_kinds = 0
        self.failure = Failure()
        self.num_graphs = 0
        self.seconds = 0.0
        for blocks in kinds:
            self._add(blocks)

    def _add(self, blocks: Iterable[nn.Module]) -> None:
        """Makes slots for blocks of one kind.

        Dynamo keeps its graphs, and limits their number, by code object. So each kind gets one of its own.
        """
        self.num_kinds += 1
        call = types.FunctionType(_call_block.__code__.replace(co_name="block"), globals())
        compiled = torch.compile(call, backend=self._backend, fullgraph=True)
        self.slots += [Slot(block, compiled, self) for block in blocks]

    def _backend(self, graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        self.num_graphs += 1
        # The backward pass is compiled at once, so that a failure is ours to catch and not the script's. It
        # keeps what the forward pass saved: a script may go back twice. Random numbers are eager's.
        with config.patch(force_non_lazy_backward_lowering=True, donated_buffer=False):
            return compile_fx(graph, inputs, config_patches={"fallback_random": True})


@contextmanager
def going_back_twice() -> Iterator[None]:
    """Inside, a backward pass of compiled code may keep its graph, in whatever thread it runs.

    torch asks in each such pass whether memory may be donated, not only when it compiles; and what is set
    in its configuration holds for one thread alone, where devices go back in threads of their own.
    """
    from torch._functorch import config

    vars(config)["donated_buffer"] = False
    try:
        yield
    finally:
        vars(config).pop("donated_buffer", None)


class Slot:
    """Stands in a module's `_compiled_call_impl`, which torch calls in place of the module.

    Only for training: a graph for evaluation would have to be compiled besides. And only while the block
    has no hooks: a graph that was compiled without them never calls them.
    """

    def __init__(self, block: nn.Module, compiled: Callable[..., Any], compiler: Compiler) -> None:
        self._alive = ref(block)  # which holds this
        self._compiled = compiled
        self._compiler = compiler
        self._hooks = hooks_of(block)

    @property
    def block(self) -> Any:
        """The block; `None` once the script has dropped it."""
        return self._alive()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, compiler = self.block, self._compiler
        as_written = compiler.failure.reason or not block.training or not torch.is_grad_enabled()
        if as_written or any(self._hooks):
            return block._call_impl(*args, **kwargs)
        graphs, begun, theirs = compiler.num_graphs, time.perf_counter(), None
        try:
            return self._compiled(block, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (the block runs as written; its own exceptions come again)
            theirs = raised_by_handler(error)
            if theirs is None:
                compiler.failure.reason = f"{type(block).__name__} could not be compiled: {in_short(error)}"
        finally:
            if compiler.num_graphs > graphs:
                compiler.seconds += time.perf_counter() - begun
        if theirs is not None:
            raise theirs
        return block._call_impl(*args, **kwargs)


def _call_block(block: Any, *args: Any, **kwargs: Any) -> Any:
    return block._call_impl(*args, **kwargs)
