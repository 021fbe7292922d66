"""The steps by the clock of the device that the model is on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diagnose.hooks._cuda import cuda_in_use, device_of
from diagnose.hooks._device import Device
from diagnose.hooks._device_ledger import DeviceLedger
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

NAME = "device_clock"
STOPPED = "The device's clock is not read any more"
NOT_READ = "The device's clock is not read on builds of torch for ROCm: all steps are by the host's clock."


class DeviceClockHook(Hook):
    """Records a CUDA event wherever the ledger changes its slot, once a model on a CUDA device has trained.

    Looks for one after each of the first steps. On a build of torch without CUDA nothing is installed, and
    as long as no model is on a device nothing is added to what an event of the loop costs. On a build for
    ROCm, which calls itself CUDA, a note says that it is not read: `CudaDevice.begin_reading` asks a driver
    of CUDA's.
    """

    requires = "torch.cuda"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        import torch

        if not torch.backends.cuda.is_built():
            yield
            return
        ledgers: list[DeviceLedger] = []

        def look() -> None:
            # An event recorded while a graph is captured is the graph's, and cannot be asked.
            if recorder.device is None and cuda_in_use() and not torch.cuda.is_current_stream_capturing():
                device = device_of(recorder.met.live_modules())
                if device is not None and torch.version.hip is not None:
                    if NOT_READ not in recorder.notes:
                        recorder.notes.append(NOT_READ)
                elif device is not None:
                    ledgers.append(follow(recorder, device))

        def tell() -> None:
            if recorder.device is not None:
                recorder.facts[NAME] = recorder.device.facts()
                note = f"{STOPPED}: {recorder.device.gave_up}. Later steps are by the host's clock."
                if recorder.device.gave_up and note not in recorder.notes:
                    recorder.notes.append(note)

        try:
            with added(recorder.looks.cared, look), added(recorder.looks.flushed, tell):
                yield
        finally:
            for ledger in ledgers:
                ledger.stop()


def follow(recorder: Recorder, device: Device) -> DeviceLedger:
    """Begins to record events of a device, on the training thread, where a step's end has been found."""
    recorder.device = DeviceLedger(
        device,
        recorder.log,
        recorder.broke,
        now_ns=recorder.clock(),
        steps=recorder.steps,
        between=recorder.finder.marked or recorder.finder.asks > 0,
    )
    return recorder.device
