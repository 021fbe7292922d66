"""What the kernels have to work with on this machine, and what was compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diagnose.kernels._build import Image, cache_folder
from diagnose.kernels._device import images, why_none
from diagnose.kernels._nvrtc import NoCompiler, nvrtc


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """What `info` found.

    Attributes:
        compiler: Name, version and place of the compiler, or why there is none.
        cache: The folder that machine code is kept in.
        devices: Each CUDA device by name, with why kernels cannot run on it; empty if they can.
        images: What was compiled or loaded in this process so far.
    """

    compiler: str
    cache: str
    devices: tuple[tuple[str, str], ...]
    images: tuple[Image, ...]

    def __str__(self) -> str:
        lines = [f"compiler: {self.compiler}", f"cache: {self.cache}"]
        lines += [f"{name}: {reason or 'supported'}" for name, reason in self.devices]
        if not self.devices:
            lines.append("no CUDA device: torch's own optimizers are used")
        for image in self.images:
            origin = "from the cache" if image.from_cache else "compiled"
            for entry, (registers, spilled) in image.registers().items():
                used = f"{registers} registers, {spilled} bytes spilled"
                lines.append(f"{entry}: {image.target}, {used}, {origin}")
        return "\n".join(lines)


def info() -> Info:
    """Looks at compiler, cache and devices. Compiles no more than a trial for each kind of device."""
    try:
        compiler = str(nvrtc())
    except NoCompiler as missing:
        compiler = str(missing)
    places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return Info(
        compiler=compiler,
        cache=str(cache_folder()),
        devices=tuple((torch.cuda.get_device_name(place), why_none(place)) for place in places),
        images=tuple(images()),
    )
