"""What the driver is asked, and in which context; a library compiled here stands in for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from diagnose.kernels import _driver
from diagnose.kernels._driver import Driver, DriverError

# A context has the number of its device and 1, and so has what is loaded there, which is served only where
# that context is current, as a driver may have it. 201 is CUDA_ERROR_INVALID_CONTEXT.
SOURCE = """
#include <stddef.h>

static _Thread_local size_t current[8];
static _Thread_local int depth;

static int enters(size_t context) { return depth && current[depth - 1] == context ? 0 : 201; }

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(size_t* context, int device) { *context = device + 1; return 0; }
int cuCtxPushCurrent_v2(size_t context) { current[depth++] = context; return 0; }
int cuCtxPopCurrent_v2(size_t* context) { *context = current[--depth]; return 0; }
int cuModuleLoadData(size_t* module, const void* cubin) {
    *module = depth ? current[depth - 1] : 0;
    return enters(*module);
}
int cuModuleGetFunction(size_t* function, size_t module, const char* name) {
    *function = module;
    return enters(module);
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* num, size_t function, int block, size_t shared) {
    *num = 4;
    return enters(function);
}
int cuGetErrorString(int code, const char** text) { *text = "invalid device context"; return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    monkeypatch.setattr(_driver, "LIBRARIES", (str(library),))
    return Driver()


@pytest.mark.parametrize("device", [0, 1])
def test_a_thread_without_a_context_is_served_in_that_of_the_device(device: int, driver: Driver) -> None:
    """As where `kernels.info()` is the first to ask."""
    function = driver.function(driver.load(b"", device), "patch", device)
    assert driver.blocks_per_multiprocessor(function, 32, device) == 4


def test_what_the_driver_refuses_is_said_in_its_words(driver: Driver) -> None:
    function = driver.function(driver.load(b"", 0), "patch", 0)
    with pytest.raises(DriverError, match=r"failed with code 201: invalid device context\.$"):
        driver.blocks_per_multiprocessor(function, 32, 1)
