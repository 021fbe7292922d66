"""Time in moving tensors between the host and a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import FIRST_GAP, SLOT_OF
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced, spanned

COPY = SLOT_OF["copy"]


class CopyToDeviceHook(Hook):
    """Charges `Tensor.to`, `Tensor.cuda` and `Tensor.copy_` from one kind of device to another to `copy`.

    Only copies that the loop itself makes: those inside the model or the optimizer belong to these. On a
    build of torch for the CPU alone nothing is installed.
    """

    requires = "torch._tensor"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        import torch

        if torch._C._get_accelerator().type == "cpu":
            yield
            return

        def moves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            if recorder.current < FIRST_GAP:
                return -1
            here = args[0].device.type
            for target in (*args[1:3], kwargs.get("device"), kwargs.get("other")):
                if isinstance(target, torch.device):
                    return COPY if target.type != here else -1
                if isinstance(target, str):
                    return COPY if target.partition(":")[0] != here else -1
                if isinstance(target, torch.Tensor):
                    return COPY if target.device.type != here else -1
            return -1

        def to_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            return COPY if recorder.current >= FIRST_GAP and args[0].device.type != "cuda" else -1

        with (
            replaced(torch.Tensor, "to", lambda original: spanned(original, recorder, moves)),
            replaced(torch.Tensor, "copy_", lambda original: spanned(original, recorder, moves)),
            replaced(torch.Tensor, "cuda", lambda original: spanned(original, recorder, to_cuda)),
        ):
            yield
