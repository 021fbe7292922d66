"""Trains a small GPT and a residual network by torch's optimizers and by kernels, losses side by side.

    python benchmarks/gpu/end_to_end.py --out out [--steps 150] [--arms "torch default" ...] [--dry-run]

Every arm starts from the same weights and sees the same batches. Two arms of torch's show how far rounding
alone carries a loss: the kernels may go no further from torch's default than a few times that, or `SLACK`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

ROOT = Path(__file__).parents[2]

TIMES_ROUNDING = 3.0
SLACK = 0.05
"""Of the mean loss of the last steps: allowed where torch's two ways of rounding happen to agree."""

LAST = 0.2
"""The share of the steps whose losses are averaged."""

SKIPPED_STEPS = 10
"""Not timed: torch and the kernels warm up."""

MAX_NORM = 1.0

Curve = tuple[list[float], list[float]]
"""The loss and the milliseconds of each step."""

Train = Callable[["Arm", torch.device, int, bool], Curve]


class Arm:
    """One way to step: torch's default, its fused one, or kernels under the default.

    Attributes:
        name: What the table calls it.
        fused: What torch's optimizer is told.
        clip: Of `swap`; `None` without kernels.
    """

    def __init__(self, name: str, *, fused: bool | None = None, clip: str | None = None) -> None:
        self.name, self.fused, self.clip = name, fused, clip

    def under(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Open while the optimizer is stepped in this way."""
        return nullcontext() if self.clip is None else self._swapped(optimizer)

    @contextmanager
    def _swapped(self, optimizer: Optimizer) -> Iterator[None]:
        from diagnose.kernels._swap import swap, unswap

        taken = swap(optimizer, clip=self.clip)  # type: ignore[arg-type]
        try:
            yield
            if taken.stepper.left:
                raise RuntimeError(f"left to torch: {'; '.join(taken.stepper.left)}")
        finally:
            unswap(optimizer)


ARMS = (
    Arm("torch default"),
    Arm("torch fused", fused=True),
    Arm("ours, exact clip", clip="exact"),
    Arm("ours, deferred clip", clip="deferred"),
)


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def train_gpt(arm: Arm, device: torch.device, steps: int, small: bool) -> Curve:
    """AdamW, bf16 autocast, clipping; the model and the text of `examples/gpt_text.py`."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt_text import GPT, make_text

    torch.manual_seed(0)
    text = make_text(2_000, random.Random(0))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text], device=device)
    block, width, layers = (32, 32, 1) if small else (256, 512, 8)
    model = GPT(len(letters), block, width, width // 16 if small else 8, layers).to(device)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=arm.fused)
    batch = 4 if small else 32

    def step(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(data) - block - 1, (batch,), generator=generator).to(device)
        windows = data[starts[:, None] + torch.arange(block + 1, device=device)]
        with torch.autocast(device.type, torch.bfloat16):
            _, loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run(arm, optimizer, step, device, steps)


def train_resnet(arm: Arm, device: torch.device, steps: int, small: bool) -> Curve:
    """SGD with nesterov's momentum, fp16 autocast with a `GradScaler`, channels last."""
    torch.manual_seed(0)
    widths = (8, 16) if small else (64, 128, 256, 512)
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(
        nn.Conv2d(3, widths[0], 3, padding=1),
        *(Residual(into, out, 2) for into, out in pairs),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], 10),
    ).to(device, memory_format=torch.channels_last)
    optimizer = SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=arm.fused
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12)
    centers = torch.randn(10, 3, 32, 32, device=device)
    batch, side = (4, 8) if small else (256, 32)
    dtype = torch.bfloat16 if small else torch.float16

    def step(number: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(number)
        labels = torch.randint(10, (batch,), generator=generator, device=device)
        noise = torch.randn(batch, 3, 32, 32, generator=generator, device=device)
        images = (centers[labels] + 3 * noise)[:, :, :side, :side]
        with torch.autocast(device.type, dtype):
            loss = F.cross_entropy(model(images.contiguous(memory_format=torch.channels_last)), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return run(arm, optimizer, step, device, steps)


def run(
    arm: Arm, optimizer: Optimizer, step: Callable[[int], Tensor], device: torch.device, steps: int
) -> Curve:
    """Trains."""
    losses, times_ms = [], []
    with arm.under(optimizer):
        for number in range(steps):
            begun = time.perf_counter()
            losses.append(step(number))
            if device.type == "cuda":
                torch.cuda.synchronize()
            times_ms.append(1e3 * (time.perf_counter() - begun))
    return torch.stack(losses).float().tolist(), times_ms


JOBS: dict[str, Train] = {"GPT": train_gpt, "ResNet": train_resnet}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    names = [arm.name for arm in ARMS]
    parser.add_argument("--arms", nargs="+", default=names, choices=names)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from optimizer_clock import clock_for

    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"dry_run": args.dry_run, "jobs": {}}
    with clock_for(dry_run=args.dry_run) as clock:
        for name in args.jobs:
            found["jobs"][name] = job = {"arms": {}, "failed": {}, "verdicts": {}}
            for arm in (arm for arm in ARMS if arm.name in args.arms):
                try:
                    losses, times_ms = JOBS[name](arm, clock.device, args.steps, args.dry_run)
                except Exception as error:  # noqa: BLE001 - the other arms are worth having
                    job["failed"][arm.name] = f"{type(error).__name__}: {error}"
                    continue
                ms = statistics.quantiles(times_ms[SKIPPED_STEPS:] or times_ms, n=4)
                job["arms"][arm.name] = {"losses": losses, "ms_quartiles": None if args.dry_run else ms}
                job["verdicts"] = verdicts(job["arms"])
                (args.out / "end_to_end.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
            print("\n".join(lines(name, job)))
    bad = [job for job in found["jobs"].values() if job["failed"] or not all(job["verdicts"].values())]
    print(f"the losses of {len(found['jobs']) - len(bad)} of {len(found['jobs'])} jobs end as torch's")
    return int(bool(bad))


def verdicts(arms: dict[str, Any]) -> dict[str, bool]:
    """Whether the losses of each arm end where those of torch's default do."""
    if "torch default" not in arms:
        return {"torch default": False}
    ends = {name: end_of(arm["losses"]) for name, arm in arms.items()}
    default = ends["torch default"]
    rounding = abs(ends.get("torch fused", default) - default)
    allowed = max(TIMES_ROUNDING * rounding, SLACK * default)
    return {name: abs(end - default) <= allowed for name, end in ends.items()}


def end_of(losses: list[float]) -> float:
    """The mean of the last ones."""
    return statistics.fmean(losses[-max(1, int(LAST * len(losses))) :])


def lines(name: str, job: dict[str, Any]) -> list[str]:
    """The table of one job: the losses at five points, and the time of a step."""
    some = next(iter(job["arms"].values()), {"losses": []})
    points = sorted({round(share * (len(some["losses"]) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    head = " | ".join(f"loss {point}" for point in points)
    found = [f"## {name}", "", f"| arm | {head} | mean of the last | ms per step | ends as torch's |"]
    found.append("|---|" + "--:|" * (len(points) + 2) + "---|")
    for arm, figures in job["arms"].items():
        losses, ms = figures["losses"], figures["ms_quartiles"]
        cells = [f"{losses[point]:.4f}" for point in points] + [f"{end_of(losses):.4f}"]
        cells.append("-" if ms is None else f"{ms[1]:.2f} ({ms[0]:.2f}-{ms[2]:.2f})")
        cells.append("yes" if job["verdicts"].get(arm) else "NO")
        found.append(f"| {arm} | {' | '.join(cells)} |")
    return [*found, *(f"| {arm} | failed: {reason} |" for arm, reason in job["failed"].items()), ""]


if __name__ == "__main__":
    sys.exit(main())
