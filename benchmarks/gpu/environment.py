"""What the machine has that the other parts of `run.sh` depend on; compiles every kernel for its GPU.

python benchmarks/gpu/environment.py --out out
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

REHEARSED = 90
"""The architecture compiled for where there is no GPU."""

TOOLS = ("nvcc", "g++", "compute-sanitizer", "ncu", "ninja")
VARIANTS = {"f32", "bf16"}
"""Of each kernel that has them. One for all dtypes at once takes ten seconds to compile, and is rare."""

LIBRARIES = (
    "apex",
    "bitsandbytes",
    "deepspeed",
    "flashoptim",
    "timm",
    "torchao",
    "triton",
    "pytest",
    "pytest-xdist",
    "pytest-timeout",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: compile for one")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "nvidia-smi": output("nvidia-smi"),
        "tools": {tool: shutil.which(tool) for tool in TOOLS},
        "libraries": {name: version(name) for name in LIBRARIES},
        "torch": guarded(torch_facts),
        "compiler": guarded(compiler_facts),
        "kernels": guarded(functools.partial(compiled_kernels, REHEARSED if args.dry_run else None)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1)
    (args.out / "environment.json").write_text(text + "\n", encoding="utf-8")
    parts = ("kernels",) if args.dry_run else ("torch", "compiler", "kernels")
    broken = [part for part in parts if "error" in found[part]]
    print(text)
    there = [name for name, version in found["libraries"].items() if version]
    device = f"sm_{REHEARSED}, without a GPU" if args.dry_run else found["torch"].get("device")
    print(
        f"no {' and no '.join(broken)}"
        if broken
        else f"{device}: all kernels compile; there are {', '.join(there)}"
    )
    return int(bool(broken))


def guarded(facts: Any) -> Any:
    """What a function returns, or what it raised: each part is worth having without the others."""
    try:
        return facts()
    except Exception as error:  # noqa: BLE001 - a report, which is to say what is broken
        return {"error": f"{type(error).__name__}: {error}"}


def torch_facts() -> dict[str, Any]:
    """Of torch and the GPU that it sees."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }


def compiler_facts() -> dict[str, Any]:
    """Of the NVRTC and the driver that the kernels use."""
    from diagnose.kernels._driver import driver
    from diagnose.kernels._nvrtc import nvrtc

    return {"nvrtc": str(nvrtc()), "driver_serves": driver().version()}


def compiled_kernels(architecture: int | None) -> dict[str, Any]:
    """Each kernel compiled for the GPU, or for this architecture: registers and bytes spilled by entry
    point, and its seconds."""
    import torch
    from diagnose.kernels._build import build
    from diagnose.kernels._kernels import kernels

    if architecture is None:
        major, minor = torch.cuda.get_device_capability()
        architecture = 10 * major + minor
    found: dict[str, Any] = {}
    for name, kernel in kernels().items():
        for variant in VARIANTS & kernel.variants.keys() or kernel.variants:
            begun = time.perf_counter()
            image = build(kernel.stem, kernel.source(), architecture, kernel.variants[variant])
            found[f"{name}, {variant}"] = {
                "registers_and_spills": image.registers(),
                "seconds": round(time.perf_counter() - begun, 3),
                "from_cache": image.from_cache,
            }
    return found


def output(*command: str) -> str:
    """What a tool prints; why not, if it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr


def version(name: str) -> str | None:
    """Of an installed library."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
