"""`diagnose doctor`: what can be measured here, in words, and what the devices reach."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from diagnose.core.checkup import Check
from diagnose.core.machine import DeviceRates, Rate
from diagnose.launch import doctor, machine_rates
from diagnose.report import Terminal, doctor_text
from diagnose.store.machine import keep_rates, kept_rates, rates_folder, read_rates
from tests.running import run


def rates(*, torch: str = "2", seconds: float = 0.0, flops: float = 4e12) -> DeviceRates:
    return DeviceRates(
        device="cpu",
        driver="d",
        torch=torch,
        copy_bytes=Rate(median=2e10, low=1e10, high=3e10),
        flops={"float32": Rate(median=flops, low=3e12, high=5e12)},
        measured_unix=seconds,
    )


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAGNOSE_STATE", str(tmp_path / "state"))


def test_rates_are_kept_per_device_driver_and_torch_and_the_newest_are_read() -> None:
    assert read_rates("cpu", "float32") is None
    keep_rates(rates(torch="1", seconds=1.0, flops=1e12))
    keep_rates(rates(torch="2", seconds=2.0))
    keep_rates(rates(torch="2", seconds=3.0, flops=4.5e12))
    assert len(kept_rates()) == 2
    found = read_rates("cpu", "float32")
    assert found is not None and (found.flops_per_s, found.copy_bytes_per_s) == (4.5e12, 2e10)
    assert read_rates("cpu", "float8") is None
    assert read_rates("another", "float32") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 2, "flops": {}}', "\0"])
def test_rates_that_cannot_be_read_are_as_if_not_there(text: str) -> None:
    path = keep_rates(rates())
    path.write_text(text, encoding="utf-8")
    assert kept_rates() == []


def test_the_text_names_each_check_and_each_rate() -> None:
    checks = [
        Check(name="torch", ok=True, words="torch 2"),
        Check(name="a driver", ok=None, words="none; " + "word " * 8 + "end"),
    ]
    assert doctor_text(checks, [rates()], Terminal(width=50, color=False)) == (
        "torch     yes  torch 2\n"
        "a driver  -    none; word word word word word word\n"
        "               word word end\n"
        "\n"
        "cpu: d, torch 2\n"
        "  copy      20 (10 to 30) GB/s read and written\n"
        "  float32   4 (3 to 5) TFLOP/s\n"
    )


def test_a_folder_that_cannot_be_written_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ok, words = doctor._store(tmp_path / "file")
    assert ok is False and "--run-dir" in words
    ok, words = doctor._store(tmp_path / "runs" / "deeper")
    assert ok is True and "write-ahead log" in words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "it leaves nothing behind"


def test_a_profiler_from_outside_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert doctor._profilers()[0] is False
    assert doctor._deep_windows()[1].startswith("another profiler is there")


def test_measured_rates_have_their_spread_and_leave_the_precision_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(machine_rates, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(machine_rates, "LONG_ENOUGH_S", {"cpu": 0.0})
    monkeypatch.setattr(machine_rates, "DTYPES", {"cpu": ("float32", "tf32")})
    products = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), getattr(products, "fp32_precision", None)
    measured = machine_rates.measure("cpu")
    assert (torch.get_float32_matmul_precision(), getattr(products, "fp32_precision", None)) == before
    for rate in (measured.copy_bytes, *measured.flops.values()):
        assert 0 < rate.low <= rate.median <= rate.high
    assert set(measured.flops) == {"float32", "tf32"}


def test_a_device_is_measured_and_waited_for_itself_and_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    waits, drawn = [], []

    def on_the_cpu(name: str) -> None:
        original = getattr(torch, name)

        def made(*size: int, device: str, **kwargs: object) -> torch.Tensor:
            drawn.append((name, len(size), device))
            return original(*size, **kwargs)

        monkeypatch.setattr(torch, name, made)

    on_the_cpu("ones")
    on_the_cpu("randn")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(machine_rates, "COPY_BYTES", {"cuda": 1 << 10})
    monkeypatch.setattr(machine_rates, "LONG_ENOUGH_S", {"cuda": 0.0})
    monkeypatch.setattr(machine_rates, "DTYPES", {"cuda": ("float32",)})
    measured = machine_rates.measure("cuda:1")
    assert measured.device == "cuda:1" and set(measured.flops) == {"float32"}
    assert len(waits) > 2 * machine_rates.REPEATS and set(waits) == {"cuda:1"}
    assert ("randn", 2, "cuda:1") in drawn and ("ones", 2, "cuda:1") not in drawn, "a product of noise"


@pytest.mark.extended
def test_the_command_answers_in_json_and_works_in_any_folder(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "diagnose", "doctor", "--json", "-")
    answer = json.loads(run(*command, cwd=tmp_path, DIAGNOSE_STATE=str(tmp_path)).stdout)
    checks = {check["name"]: check for check in answer["checks"]}
    assert checks["torch"]["ok"] is True and checks["store"]["ok"] is True
    assert answer["rates"] == [] and not rates_folder().exists()
