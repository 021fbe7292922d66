"""Downloads the libraries whose optimizers take part in the table, for a machine that cannot.

    python benchmarks/gpu/competitors.py [--into .wheels] [--python 3.12]

`run.sh` unpacks what is in the folder, for one run, without installing anything. DeepSpeed is a source
package: its extension is compiled there, by nvcc. Here pip runs its setup.py, which needs torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from pathlib import Path

WHEELS = (
    "bitsandbytes==0.50.2",
    "flashoptim==0.1.4",
    "timm==1.0.31",
    "torchao==0.18.0",
    # DeepSpeed's own needs, without those that come with most installations of torch
    "annotated-types",
    "hjson",
    "pydantic",
    "typing-inspection",
)
SOURCES = ("deepspeed==0.19.8",)

GLIBC = (17, 24, 27, 28, 31, 34)
"""Minor versions that a Linux of these years can load."""

CUDA_OF_BITSANDBYTES = "libbitsandbytes_cuda13"
"""It brings a library of 20 MB for each CUDA; those for others are left out."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path(".wheels"))
    parser.add_argument("--python", default="3.12", help="of the machine they are for")
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(args.into)]
    built = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", args.python]
    built += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + [
        "--platform=manylinux2014_x86_64"
    ]
    missing = [name for name in WHEELS if subprocess.run([*pip, *built, name], check=False).returncode]
    # What pydantic's compiled half must be, to the digit, only pydantic says.
    for wheel in args.into.glob("pydantic-*.whl"):
        exact = needed(wheel, "pydantic-core")
        missing += [exact] if subprocess.run([*pip, *built, exact], check=False).returncode else []
    source = [*pip, "--no-build-isolation", "--no-binary", "deepspeed"]
    missing += [name for name in SOURCES if subprocess.run([*source, name], check=False).returncode]
    for wheel in args.into.glob("bitsandbytes-*.whl"):
        slim(wheel)
    total = sum(path.stat().st_size for path in args.into.iterdir())
    print(f"{len(list(args.into.iterdir()))} files, {total / 1e6:.0f} MB; not found: {missing or 'none'}")
    return int(bool(missing))


def needed(wheel: Path, name: str) -> str:
    """The exact version of another package that a wheel asks for."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        for line in archive.read(metadata).decode().splitlines():
            if line.startswith("Requires-Dist:") and name in line:
                return line.removeprefix("Requires-Dist:").partition(";")[0].strip()
    return name


def slim(wheel: Path) -> None:
    """Takes compiled code for other devices out of bitsandbytes' wheel."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for each in old.infolist():
            library = Path(each.filename).name
            if library.endswith(".so") and not library.startswith(
                (CUDA_OF_BITSANDBYTES, "libbitsandbytes_cpu")
            ):
                continue
            new.writestr(each, old.read(each))
    os.replace(smaller, wheel)


if __name__ == "__main__":
    sys.exit(main())
