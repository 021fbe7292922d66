"""The compiler and its cache: real compilations by the NVRTC that is installed, without a GPU."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnose.kernels import _build, _nvrtc
from diagnose.kernels._build import cache_folder

SOURCE = """
#ifndef FACTOR
#define FACTOR 2
#endif
extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }
"""

REPOSITORY = Path(__file__).parents[1]


def build(architecture: int = 90, source: str = SOURCE, **defines: int) -> _build.Image:
    return _build.build("twice", source, architecture, defines)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty one."""
    try:
        _nvrtc.nvrtc()
    except _nvrtc.NoCompiler as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _build._warn_once.cache_clear()
    yield
    _build._warn_once.cache_clear()


def entries() -> list[Path]:
    return sorted(cache_folder().iterdir())


def test_the_second_build_is_read_from_the_disk_and_equal() -> None:
    first, second = build(), build()
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.cubin == second.cubin
    assert first.cubin.startswith(b"\x7fELF")
    assert second.registers() == first.registers()
    assert second.registers()["twice"][1] == 0, "bytes spilled"


def test_what_the_code_depends_on_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    assert not build(source=SOURCE + "// changed").from_cache, "the source"
    assert not build(FACTOR=3).from_cache, "a macro"
    assert not build(80).from_cache, "the architecture"
    monkeypatch.setattr(_build, "FLAGS", (*_build.FLAGS, "--use_fast_math"))
    assert not build().from_cache, "a flag"
    assert len(entries()) == 5


def test_many_processes_that_build_the_same_at_once_leave_one_good_entry() -> None:
    program = (
        "import sys, hashlib; from diagnose.kernels._build import build;"
        "print(hashlib.sha256(build('twice', sys.argv[1], 90).cubin).hexdigest())"
    )
    command = [sys.executable, "-W", "error", "-c", program, SOURCE]
    ranks = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [error for _, error in outputs] == [""] * 8
    assert len({output for output, _ in outputs}) == 1
    assert [path.suffix for path in entries()] == [".cubin"], "no unfinished file is left"
    assert build().from_cache


@pytest.mark.parametrize("damage", ["torn", "one bit", "empty", "another file"])
def test_a_damaged_entry_is_compiled_anew_with_one_warning(damage: str) -> None:
    good = build()
    [path] = entries()
    whole = bytearray(path.read_bytes())
    if damage == "one bit":
        whole[-300] ^= 4
    path.write_bytes({"torn": whole[:-100], "empty": b"", "another file": b"{}\n\n"}.get(damage, whole))
    with pytest.warns(RuntimeWarning, match="is damaged; compiled anew") as given:
        again = build()
    assert len(given) == 1
    assert (again.from_cache, again.cubin) == (False, good.cubin)
    assert build().from_cache, "it was mended"


def test_a_cache_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.warns(RuntimeWarning, match="compile") as given:
        images = [build(), build()]
    assert not any(image.from_cache for image in images)
    assert len([each for each in given if "cannot be written" in str(each.message)]) == 1


def test_a_source_that_does_not_compile_is_named_with_its_line_and_not_kept() -> None:
    with pytest.raises(_nvrtc.CompileError, match=r"(?s)does not compile for sm_90 .*twice.cu\(1\)"):
        build(source="nonsense;")
    assert not cache_folder().exists()


def test_a_device_that_no_compiler_knows_is_named() -> None:
    with pytest.raises(_nvrtc.NoCompiler, match=r"twice: NVRTC .* has no image for sm_61; it has sm_"):
        build(61)


def test_a_device_newer_than_the_compiler_gets_the_nearest_older_code_of_its_family() -> None:
    compiler = _nvrtc.nvrtc()
    assert compiler.target(80) == "sm_80"
    assert compiler.target(90) == "sm_90"
    assert compiler.target(99) == "sm_90"
    assert compiler.target(61) is None


def test_a_device_of_a_later_family_than_the_compiler_knows_gets_code_that_its_driver_compiles() -> None:
    newest = max(_nvrtc.nvrtc().architectures)
    image = build(architecture=999)
    assert image.target == f"compute_{newest}"
    assert f".target sm_{newest}".encode() in image.cubin
    assert build(architecture=999).cubin == image.cubin
    assert image.registers() == {}, "which are not known before"


def test_without_a_compiler_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(_nvrtc, "candidates", lambda: iter([str(broken)]))
    _nvrtc.nvrtc.cache_clear()
    try:
        with pytest.raises(_nvrtc.NoCompiler, match=r"pip install nvidia-cuda-nvrtc. Tried: .*libnvrtc"):
            _nvrtc.nvrtc()
    finally:
        _nvrtc.nvrtc.cache_clear()


def test_importing_the_kernels_loads_neither_torch_nor_a_compiler() -> None:
    program = "import sys, diagnose.kernels; print(sorted({'torch', 'ctypes'} & set(sys.modules)))"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_building_gives_no_warning_when_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build()
