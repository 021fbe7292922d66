"""How long does a loop wait for a finished batch of arrays, and for one of tensors?

    python benchmarks/piped_batches.py

Workers hand tensors over through shared memory, and pickle all else into a pipe, which takes no more than
64 KiB before somebody reads it. Prints the median wait for a batch that one worker had finished long
before: what the rule `worker-transfer` counts on.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

KIB = (64, 256, 1024, 4096, 16384)
SAMPLES, BATCHES, FIRST = 8, 14, 4
STEP_S = 0.06
"""The worker has made the next batches long before it is over."""


class Rows(Dataset[Any]):
    """Samples of so many KiB."""

    def __init__(self, kib: int, *, as_tensors: bool) -> None:
        self.kib, self.as_tensors = kib, as_tensors

    def __len__(self) -> int:
        return SAMPLES * (BATCHES + 1)

    def __getitem__(self, index: int) -> Any:
        row = np.zeros(self.kib * 1024 // 8)
        return torch.from_numpy(row) if self.as_tensors else row


def wait_ms(kib: int, *, as_tensors: bool) -> float:
    """Returns the median wait for a batch of so many KiB."""
    rows = Rows(kib // SAMPLES, as_tensors=as_tensors)
    collate = torch.stack if as_tensors else list
    batches = iter(DataLoader(rows, batch_size=SAMPLES, num_workers=1, collate_fn=collate))
    times = []
    for _ in range(BATCHES):
        time.sleep(STEP_S)
        begun = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times[FIRST:])


def main() -> None:
    torch.set_num_threads(1)
    print("| KiB | arrays, ms | tensors, ms |")
    print("|---|---|---|")
    for kib in KIB:
        arrays_ms, tensors_ms = (wait_ms(kib, as_tensors=each) for each in (False, True))
        print(f"| {kib:,} | {arrays_ms:.1f} | {tensors_ms:.1f} |")


if __name__ == "__main__":
    main()
