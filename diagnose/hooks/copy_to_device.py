"""Time in moving tensors between the host and a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from diagnose.core.ledger import COPY, FIRST_GAP
from diagnose.hooks._copies import Copies
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import THEN, Hook, StandIn, hidden, replaced, spanned, unseen


class CopyToDeviceHook(Hook):
    """Charges `Tensor.to`, `Tensor.cuda` and `Tensor.copy_` from one kind of device to another to `copy`.

    Only copies that the loop itself makes: those inside the model or the optimizer belong to these. In the
    first steps their bytes are counted too, by line, and those of `Tensor.cpu`, whose time is that of the
    line it stands in: mostly it waits for a result. On a build of torch for the CPU alone nothing is
    installed.
    """

    requires = "torch._tensor"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        import torch

        accelerator = _built_for()
        if not accelerator:
            yield
            return
        copies = Copies(recorder)
        looking: tuple[Any, ...] | None = None

        def kind_of(target: Any) -> str:
            """The kind of device that an argument names; empty where it names none."""
            if isinstance(target, torch.device):
                return target.type
            if isinstance(target, str):
                return target.partition(":")[0]
            if isinstance(target, torch.Tensor):
                return target.device.type
            return accelerator if type(target) is int else ""

        def target_of_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            for target in (*args[1:3], kwargs.get("device"), kwargs.get("other")):
                kind = kind_of(target)
                if kind:
                    return kind
            return ""

        def watching(
            ends: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, str]],
        ) -> Callable[[Any], Any]:
            """Makes a wrapper; `ends` returns the tensor that is copied, and where to."""

            def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
                nonlocal looking
                if recorder.current < FIRST_GAP:
                    return -1
                source, target = ends(args, kwargs)
                if not target or source.device.type == target:
                    return -1
                if not copies.looks:
                    return COPY
                if target == "cpu":
                    looking = (copies.fetched, source, perf_counter_ns(), True)
                else:
                    looking = (copies.sent, source, perf_counter_ns(), source.is_pinned())
                return COPY + THEN

            def after(args: tuple[Any, ...], result: Any) -> None:
                nonlocal looking
                looked, looking = looking, None
                if looked is not None:
                    looked[0](*looked[1:])

            return lambda original: StandIn(spanned(original, recorder, before, after), original)

        def wrap_cpu(original: Any) -> Any:
            from torch.compiler import is_dynamo_compiling

            inside = False

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                begun_ns = 0
                if copies.looks and not inside and not is_dynamo_compiling():
                    looks = get_ident() == recorder.thread and recorder.current >= FIRST_GAP
                    begun_ns = perf_counter_ns() if looks and args[0].device.type != "cpu" else 0
                inside = inside or begun_ns > 0  # a subclass of tensors comes here again
                try:
                    result = original(*args, **kwargs)
                except BaseException as error:
                    unseen(error)
                    raise
                finally:
                    inside = inside and not begun_ns
                if begun_ns:
                    recorder.guarded(copies.fetched, args[0], begun_ns, False)
                return result

            return StandIn(hidden(call), original)

        def tell() -> None:
            recorder.facts["copies"] = copies.facts()

        with (
            replaced(torch.Tensor, "to", watching(lambda a, k: (a[0], target_of_to(a, k)))),
            replaced(
                torch.Tensor,
                "copy_",
                watching(lambda a, k: (a[1] if len(a) > 1 else k["src"], a[0].device.type)),
            ),
            replaced(torch.Tensor, "cuda", watching(lambda a, k: (a[0], "cuda"))),
            replaced(torch.Tensor, "cpu", wrap_cpu),
            added(recorder.looks.flushed, tell),
        ):
            yield


def _built_for() -> str:
    """The kind of device beyond the CPU that this build of torch is for; empty for the CPU alone.

    Asking for one that is there would start the driver, which then takes no other CUDA_VISIBLE_DEVICES from
    the script, and leaves forked processes without devices.
    """
    import torch

    if torch.__version__ < "2.7":  # which asks for one that is there
        return "cuda" if torch.backends.cuda.is_built() else ""
    built_for = torch.accelerator.current_accelerator()
    return built_for.type if built_for is not None else ""
