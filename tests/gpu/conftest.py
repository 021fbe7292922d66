"""Every test here carries the marker `gpu`.

With `KERNELS_ON_CPU=1` in the environment those that can are rehearsed on a CPU, by the emulated device:
that shows that a test is right before it meets a GPU, and nothing of the GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diagnose.kernels._clip import CLIPPING

from tests.kernels_on_cpu import CPU, kernels_on_cpu

signal.signal(signal.SIGTERM, signal.default_int_handler)  # out of time: what failed is still printed

REHEARSAL = os.environ.get("KERNELS_ON_CPU") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not REHEARSAL and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """In place of the check that all other tests have: on a GPU torch changes its own modules as it goes.
    A test that failed leaves its kernels behind; the next must not meet them."""
    yield
    for swap in list(CLIPPING.swaps):
        swap.remove()


@pytest.fixture
def place() -> Iterator[torch.device]:
    """Where the tensors of a test are."""
    if not REHEARSAL:
        yield torch.device("cuda", torch.cuda.current_device())
        return
    with kernels_on_cpu():
        yield CPU


@pytest.fixture
def gpu() -> torch.device:
    """Likewise, for a test that says nothing on an emulated device."""
    if REHEARSAL:
        pytest.skip("needs a CUDA GPU: an emulated one has no streams, graphs or memory of its own")
    return torch.device("cuda", torch.cuda.current_device())
