"""Where DDP waits for other ranks: at the end of a backward pass, and for buffers before a forward."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import BACKWARD, COMMUNICATION, FORWARD
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.autograd_graph import tensors_of
from diagnose.hooks.base import Hook, around, hidden, replaced, unseen


class DdpWaitsHook(Hook):
    """Charges to `communication` what a backward pass waits for gradients on their way, and a forward pass
    for the first rank's buffers.

    DDP waits in a function that autograd calls when the pass has computed everything, and autograd calls
    such functions in the order in which they were asked for. Ours is asked for as the pass begins, by a
    hook of the loss's own node that is gone when the pass ends; DDP's when its last gradient is there. So
    ours is called between the last gradient and the wait. No communication hook is set, and no model is
    touched.

    Where gradients live on a CUDA device the host does not wait there, and no wait is told.
    """

    requires = "torch.nn.parallel.distributed"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.autograd import Variable
        from torch.compiler import is_dynamo_compiling
        from torch.nn.parallel import DistributedDataParallel

        queue_callback = Variable._execution_engine.queue_callback
        reducing: list[weakref.ref[Any]] = []
        handle: Any = None
        looks = recorder.looks

        def arrived() -> None:
            nonlocal handle
            if handle is not None:
                handle.remove()
                handle = None
            if recorder.current == BACKWARD and recorder.on_training_thread() and any_reduces(reducing):
                recorder.guarded(recorder.arrive)

        def begun(grads: Any) -> None:
            try:
                queue_callback(arrived)
            except Exception:  # noqa: BLE001 (the one place where a hook meets the script)
                recorder.broke(begun)

        def watch() -> None:
            if on_pass not in looks.on_pass:
                looks.on_pass.append(on_pass)

        def on_pass(args: tuple[Any, ...]) -> None:
            nonlocal handle
            node = root(args)
            if node is None or is_autograd_compiled():
                return
            if handle is not None:  # of a pass that failed
                handle.remove()
            handle = node.register_prehook(begun)

        def made(args: tuple[Any, ...], result: None) -> None:
            reducing.append(weakref.ref(args[0]))
            watch()

        def wrap_buffers(original: Any) -> Any:
            def sync(model: Any, *args: Any, **kwargs: Any) -> Any:
                interrupted = recorder.current
                if is_dynamo_compiling() or interrupted != FORWARD or not recorder.on_training_thread():
                    return original(model, *args, **kwargs)
                if model.device_type == "cpu":
                    recorder.guarded(recorder.arrive)
                else:
                    recorder.push(COMMUNICATION)
                try:
                    return original(model, *args, **kwargs)
                except BaseException as error:
                    unseen(error)
                    raise
                finally:
                    recorder.run_into(interrupted)

            return hidden(functools.wraps(original)(sync))

        def find(args: tuple[Any, ...]) -> None:
            """Models that were there before this hook was: `diagnose.attach` may come late."""
            known = [reference() for reference in reducing]
            for model in recorder.met.live_modules():
                if isinstance(model, DistributedDataParallel) and model not in known:
                    reducing.append(weakref.ref(model))
                    watch()

        try:
            with (
                added(looks.on_backward, find),
                replaced(DistributedDataParallel, "__init__", lambda init: around(init, after=made)),
                replaced(DistributedDataParallel, "_sync_buffers", wrap_buffers),
            ):
                yield
        finally:
            if on_pass in looks.on_pass:
                looks.on_pass.remove(on_pass)


def root(args: tuple[Any, ...]) -> Any:
    """Returns the node at which a backward pass begins; `None` where it has none of its own."""
    return next((tensor.grad_fn for tensor in tensors_of(args) if tensor.grad_fn is not None), None)


def is_autograd_compiled() -> bool:
    """Whether Dynamo traces the pass itself, our function included."""
    compiler: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiler, "compiled_autograd_enabled", False))


def any_reduces(models: Sequence[weakref.ref[Any]]) -> bool:
    """Whether the gradients of a pass are averaged now: not under `no_sync`, and on CPUs."""
    for reference in models:
        model = reference()
        if model is not None and model.device_type == "cpu" and averages(model):
            return True
    return False


def averages(model: Any) -> bool:
    """Whether a backward pass that begins or ends now averages the gradients of a model wrapped in DDP.

    DDP decides that in its last forward call, whatever `no_sync` is around the pass itself, and has the
    next call send buffers if it did. Where compiled autograd reduces, it is decided in the pass.
    """
    if vars(model).get("_use_python_reducer"):
        return bool(model.require_backward_grad_sync)
    return bool(model.require_forward_param_sync)
