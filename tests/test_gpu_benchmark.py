"""The scripts for a GPU, as far as they can be run without one: the same code, on the emulated device."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import time
import weakref
import zipfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch  # before any test, which would be charged with what torch does as it is imported

from diagnose.core.phases import Phase
from diagnose.rules._examples import card

GPU = Path(__file__).parents[1] / "benchmarks" / "gpu"


@pytest.fixture(autouse=True)
def scripts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))


def test_the_shell_script_parses_and_refuses_a_part_that_it_does_not_have(tmp_path: Path) -> None:
    script = str(GPU / "run.sh")
    subprocess.run(["bash", "-n", script], check=True)
    environment = os.environ | {"OUT": str(tmp_path)}
    done = subprocess.run(
        ["bash", script, "optimisers"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no part optimisers" in done.stderr


def test_both_calls_of_the_shell_script_fit_into_the_time_a_card_is_held_for() -> None:
    held_s, start_s = 900, 60  # it took 30 s to start and as long to end
    script = (GPU / "run.sh").read_text(encoding="utf-8")

    def number(pattern: str) -> int:
        [found] = re.findall(pattern, script)
        return int(found)

    total_s = number(r"TOTAL_S:-\$\(\((\d+) \* SLOWER\)\)")
    [rest] = re.findall(r'^REST="(.*)"$', script, re.MULTILINE)
    limits = {name: number(rf"&& part {name} (\d+)") for name in rest.split()}
    assert 2 * (total_s + start_s) <= held_s
    first = re.findall(r"^#   benchmarks/gpu/run\.sh ([a-z][a-z -]*?)   ", script, re.MULTILINE)[0].split()
    assert sum(limits[part] for part in first) <= total_s
    assert number(r"faults\.py --out '\$OUT' --seconds (\d+)") <= limits["faults"] - 20, (
        "torch is imported before"
    )
    ledger_s = number(r"--seconds \$\(\((\d+) \* SLOWER\)\)")
    file_s = number(r"FILE_S=(\d+) tests")
    assert number(rf"FILE_S={file_s} tests (\d+) signal") < file_s < limits["device-tests"] / 2, (
        "a hang costs one"
    )
    assert ledger_s + 15 <= limits["device-ledger"], "what is begun may take longer than it was thought to"


def test_a_fault_that_cannot_be_read_costs_neither_the_others_nor_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = importlib.import_module("faults")
    finding = {"rule": "host-sync", "lost_ms_per_step": 0.5}
    readings = card(utilisation_share=0.9, idle_at_most_ns={Phase.FORWARD: 1e6})
    good = {"steps": {"median_ms": 2.0, "mean_ms": 2.0}, "findings": [], "device": asdict(readings)}
    answers = {
        "none": good,
        "host-sync": {**good, "findings": [finding]},
        "fp32-matmul": {"phases": {1, 2}},
    }

    def heard(case: Any, *_: object) -> Any:
        if case.fault not in answers:
            raise LookupError("torn")
        return answers[case.fault]

    monkeypatch.setattr(faults, "heard", heard)
    names = ["gpt:none", "gpt:host-sync", "gpt:fp32-matmul", "gpt:slow-optimizer"]
    monkeypatch.setattr(sys, "argv", ["faults.py", "--out", str(tmp_path), *names])
    assert faults.main() == 1
    said = capsys.readouterr().out
    assert "| gpt | host-sync | 0% | host-sync | 25% |  | 2.00 | 10% |" in said
    assert "2 of 4 verdicts are right; 2 runs ended badly: " in said
    written = json.loads((tmp_path / "faults.json").read_text())
    assert set(written) == set(names)
    assert written["gpt:slow-optimizer"]["bad"] == "not read: LookupError: torn"
    assert written["gpt:none"]["device"]["idle_at_most_ns"] == {"forward": 1e6}


INTERPRETER = """#!/usr/bin/env bash
case "$*" in
    *check.py*) echo "B0 ours: off by 0.5 | WRONG"; exit 1 ;;
    *--prepare*) echo "compiled"; setsid sleep 30 & disown; exit 0 ;;
    *optimizers.py*) echo "{}" >"$OUT/optimizers.json"; echo "$*"; echo "$PYTHONPATH"; exit 0 ;;
    *end_to_end.py*) kill -SEGV $$ ;;
    *diagnose*) echo '{"notes": ["measuring failed in CopyToDeviceHook.install: no"]}' >"$OUT/tune.json" ;;
    *sys.executable*) echo /somewhere ;;
esac
"""
"""Parts end well, wrongly, leaving a process behind that holds the output, and by a signal."""


def test_no_part_of_the_shell_script_costs_another(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(INTERPRETER, encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some/__init__.py", "")
    (tmp_path / "other-1.0").mkdir()
    with tarfile.open(tmp_path / "wheels" / "other-1.0.tar.gz", "w:gz") as source:
        source.add(tmp_path / "other-1.0", "other-1.0")
    parts = ["environment", "check", "prepare", "optimizers", "end-to-end", "tune"]
    begun = time.monotonic()
    done = subprocess.run(
        ["bash", str(GPU / "run.sh"), *parts],
        env=os.environ | {"PYTHON": "./python", "OUT": "found", "WHEELS": "wheels", "DRY_RUN": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert time.monotonic() - begun < 25, "nothing waits for the process that one part left behind"
    assert done.returncode == 1 and "3 of 6 parts" in done.stdout, done.stdout + done.stderr
    lines = (tmp_path / "found" / "summary.md").read_text().splitlines()
    results = dict(
        line.strip("| ").split(" | ")[:2] for line in lines if line.startswith("| ") and "--" not in line
    )
    assert {part: results[part] for part in parts} == {
        "environment": "ok",
        "check": "failed",
        "prepare": "ok",
        "optimizers": "ok",
        "end-to-end": "failed",
        "tune": "failed",
    }
    assert "| exit code 1; measuring failed in CopyToDeviceHook.install: no |" in "\n".join(lines)
    assert "B0 ours: off by 0.5 / WRONG" in "\n".join(lines)
    assert {path.name for path in (tmp_path / "found").iterdir()} == {
        "log.txt",
        "optimizers.json",
        "summary.md",
        "tune.json",
    }
    log = (tmp_path / "found" / "log.txt").read_text()
    assert "/site:" in log and "/sources/other-1.0" in log, "what was unpacked is looked into"


ENDS_THE_PROCESS = """
import os

class AdamW8bit:
    def __init__(self, *args, **options):
        os._exit(7)
"""


HANGS = ENDS_THE_PROCESS.replace("import os", "import time").replace("os._exit(7)", "time.sleep(1000)")


def rehearsed(folder: Path, library: str, *cases: str) -> subprocess.CompletedProcess[str]:
    """Goes through some cases beside a `bitsandbytes` of our own."""
    package = folder / "libraries" / "bitsandbytes"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "optim.py").write_text(library, encoding="utf-8")
    command = [sys.executable, str(GPU / "optimizers.py"), "--dry-run", "--out", str(folder)]
    done = subprocess.run(
        [*command, "--minutes", "3", "--cases", *cases],
        env=os.environ | {"PYTHONPATH": str(folder / "libraries")},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.extended
def test_the_table_of_optimizers_is_rehearsed_on_the_emulated_device(tmp_path: Path) -> None:
    """Beside a library that ends its process in the middle, as a kernel that breaks the device would."""
    done = rehearsed(tmp_path, ENDS_THE_PROCESS, "F/tiny", "B0/tiny")
    report = json.loads((tmp_path / "optimizers.json").read_text())
    assert report["broke"] == ["F/tiny: a child exited with 7 at F: bitsandbytes AdamW8bit"]
    with_bytes, measured = report["cases"]
    found = {each["name"]: each["status"] for each in with_bytes["contenders"]}
    assert {name: found[name] for name in ("torch fused", "bitsandbytes AdamW8bit", "ours")} == {
        "torch fused": "measured",
        "bitsandbytes AdamW8bit": "failed",
        "ours": "measured",
    }
    found = {each["name"]: each for each in measured["contenders"]}
    assert {name: each["status"] for name, each in found.items() if name != "DeepSpeed FusedAdam"} == {
        "torch default": "measured",
        "torch fused": "measured",
        "ours, exact clip": "measured",
        "ours, deferred clip": "measured",
        "ours, deferred, moving": "measured",
    }, done.stderr
    launches = {
        name: each["launches"]["kernels"] for name, each in found.items() if name.startswith("ours")
    }
    assert launches == {"ours, exact clip": 3, "ours, deferred clip": 2, "ours, deferred, moving": 2}
    assert found["ours, exact clip"]["error"] < 1e-5

    text = (tmp_path / "optimizers.md").read_text()
    assert "A rehearsal on a CPU: nothing was timed." in text
    assert " ms (" not in text and " us (" not in text


def test_what_a_process_found_before_it_hung_is_kept_and_what_hung_is_left_out_from_then_on(
    tmp_path: Path,
) -> None:
    conduct = importlib.import_module("optimizer_conduct")
    report = {"dry_run": True, "machine": {}, "cases": [], "broke": []}
    progress = conduct.Progress(report=report, out=tmp_path, pending=["A/x", "B/x", "C/x"])
    so_far = {"row": "A", "title": "", "shape": "x", "tensors": 1, "elements": 1, "contenders": []}

    def lost(case: str, trying: str, **found: object) -> None:
        progress.hear({"begun": case})
        for line in ({"trying": trying, "patience_s": 5.0}, found):
            progress.hear(line)
        assert progress.patience_s == 5.0
        progress.lost("it hung")

    lost("A/x", "torch compiled", so_far=so_far)
    assert progress.pending == ["B/x", "C/x"], "two rounds of turns are better than a second try"
    lost("B/x", "DeepSpeed")
    assert progress.pending == ["B/x", "C/x"], "tried again without it"
    assert progress.without == ["torch compiled", "DeepSpeed"]
    progress.hear({"begun": "B/x"})
    progress.lost("it broke")
    assert progress.pending == ["C/x"], "nobody is to blame, so it would break again"
    kept = json.loads((tmp_path / "optimizers.json").read_text())
    assert [case["case"] for case in kept["cases"]] == ["A/x", "B/x"]
    assert kept["cases"][0]["cut_off"] == "it hung at torch compiled"
    assert kept["not_reached"] == ["C/x"]


def test_only_what_a_library_brings_for_the_devices_at_hand_is_carried(tmp_path: Path) -> None:
    competitors = importlib.import_module("competitors")
    wheel = tmp_path / "bitsandbytes-1.0-py3-none-any.whl"
    kept = {"bitsandbytes/optim.py", "bitsandbytes/libbitsandbytes_cuda130.so", "b.dist-info/METADATA"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            *kept,
            "bitsandbytes/libbitsandbytes_cuda124.so",
            "bitsandbytes/libbitsandbytes_xpu.so",
        ):
            archive.writestr(name, "Requires-Dist: pydantic-core==2.5; extra == 'x'\n")
    competitors.slim(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == kept
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    assert competitors.needed(wheel, "pydantic-core") == "pydantic-core==2.5"


def test_goals_are_met_or_missed_by_what_was_measured_and_open_where_nothing_was() -> None:
    """Ours at 8.4 ms and 86 % of a copy's bandwidth; what was never launched or measured stays open."""
    report = importlib.import_module("optimizer_report")

    def measured(name: str, ms: float, num_bytes: int, launches: int) -> dict[str, object]:
        times = {"q1": ms * 1e6, "median": ms * 1e6, "q3": ms * 1e6, "num": 50}
        return {
            "name": name,
            "ours": name == "ours",
            "note": "",
            "bytes_per_element": num_bytes,
            "status": "measured",
            "error": 1e-7,
            "extra_bytes": 0,
            "launches": {"kernels": launches, "copies": 0, "names": []},
            **dict.fromkeys(("gpu_ns", "wall_ns", "host_ns"), times),
        }

    contenders = [measured("ours", 8.4, 28, 1), measured("torch default", 25.2, 80, 500)]
    contenders += [measured("torch fused", 8.82, 28, 60) | {"launches": None}]
    contenders += [{"name": "DeepSpeed FusedAdam", "ours": False, "note": "", "status": "not installed"}]
    case = {"case": "A/Llama-1B", "row": "A", "title": "", "shape": "Llama-1B", "tensors": 146}
    lines = report.markdown(
        {
            "machine": {"copy_bytes_per_s": 4.8e12},
            "dry_run": False,
            "cases": [case | {"elements": 1.24e9, "contenders": contenders}],
            "not_reached": ["B/Llama-1B"],
        }
    )
    goals = [line for line in lines if line.startswith("| A/Llama-1B |")]
    assert goals == [
        "| A/Llama-1B | torch default / ours, GPU | 2.7 | 3.00 | met |",
        "| A/Llama-1B | torch fused / ours, GPU | 1.1 | 1.05 | MISSED by 5% |",
        "| A/Llama-1B | DeepSpeed FusedAdam / ours, GPU | 1.15 | - | not measured |",
        "| A/Llama-1B | bandwidth of ours, of a copy's | 92% | 86% | MISSED by 6% |",
    ]
    assert any("| B/Llama-1B |" in line and "not measured" in line for line in lines)
    assert any("| 1.05 x as fast |" in line and "| ? |" in line for line in lines), (
        "the profiler was refused"
    )


def test_every_goal_names_a_case_and_contenders_that_there_are() -> None:
    goals, optimizers, rows, case = (
        importlib.import_module(name)
        for name in ("optimizer_goals", "optimizers", "optimizer_rows", "optimizer_case")
    )
    by_letter = {row.letter: row for row in rows.ROWS}
    for each in goals.GOALS:
        assert each.case in optimizers.CASES
        letter, _, shape = each.case.partition("/")
        compiled = shape.endswith("/compiled")
        there = {c.name for c in by_letter[letter].contenders if case.takes_part(c, with_compiled=compiled)}
        assert {each.ours, *each.ratios} <= there


@pytest.mark.extended
def test_a_library_that_hangs_is_given_up_and_the_rest_is_measured(tmp_path: Path) -> None:
    rehearsed(tmp_path, HANGS, "F/tiny")
    report = json.loads((tmp_path / "optimizers.json").read_text())
    [broke] = report["broke"]
    assert broke.startswith("F/tiny: a child was silent for 60 s at F: bitsandbytes")
    found = {each["name"]: each["status"] for each in report["cases"][0]["contenders"]}
    assert (found["torch fused"], found["bitsandbytes AdamW8bit"], found["ours"]) == (
        "measured",
        "failed",
        "measured",
    )


@pytest.mark.extended
def test_the_shell_script_runs_every_part_through_without_a_gpu(tmp_path: Path) -> None:
    """And writes nowhere but where it was told to."""
    before = around(GPU / "run.sh")
    done = subprocess.run(
        ["bash", str(GPU / "run.sh")],
        env=os.environ | {"DRY_RUN": "1", "PYTHON": sys.executable, "OUT": "found"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    log = (tmp_path / "found" / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-8000:]
    assert around(GPU / "run.sh") == before
    assert len(list((tmp_path / "found").iterdir())) <= 8

    report = json.loads((tmp_path / "found" / "optimizers.json").read_text())
    assert report["broke"] == [] and report["not_reached"] == []
    rows = {"A", "B", "B0", "C", "C0", "D", "E", "F", "G", "H", "I"}
    assert {case["row"] for case in report["cases"]} == rows
    ours = [each for case in report["cases"] for each in case["contenders"] if each["ours"]]
    assert {each["status"] for each in ours} == {"measured"}
    jobs = json.loads((tmp_path / "found" / "end_to_end.json").read_text())["jobs"]
    assert all(len(job["arms"]) == 4 and not job["failed"] for job in jobs.values())


def around(script: Path) -> set[Path]:
    """What lies beside a script, and in its repository's folder."""
    return {*script.parent.iterdir(), *script.parents[2].iterdir()}


def test_gradients_that_move_take_their_second_place_in_their_own_turn_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contenders, case = (
        importlib.import_module(name) for name in ("optimizer_contenders", "optimizer_case")
    )
    monkeypatch.setattr(contenders, "kernels_under", lambda optimizer, **swapped: nullcontext())
    params = [torch.zeros(3, requires_grad=True)]
    work = contenders.Work(params=params, grads=[torch.ones(3)], kept=[], max_norm=1.0, dry_run=True)
    case.point(work)
    pipeline = contenders.ours(contenders.adamw(), clips=False, moving=True)(work)
    places, second = [], None
    with pipeline.turn():
        for _ in range(3):
            pipeline.step()
            pipeline.after()
            places.append(params[0].grad.data_ptr())
            second = second or weakref.ref(params[0].grad)
    assert places[0] == places[2] != places[1] == work.grads[0].data_ptr()
    case.point(work)  # which begins the next turn
    assert second() is None


def test_every_case_in_fp32_fits_a_card_of_80_gb() -> None:
    """All that takes part lives at once: lists as large as the parameters, two of moments for each. One
    more is the second place of gradients, or what torch's default step computes in."""
    optimizers, rows, case, shapes = (
        importlib.import_module(name)
        for name in ("optimizers", "optimizer_rows", "optimizer_case", "optimizer_shapes")
    )
    by_letter = {row.letter: row for row in rows.ROWS}
    for name in optimizers.CASES:
        letter, _, shape = name.partition("/")
        row, compiled = by_letter[letter], shape.endswith("/compiled")
        elements = sum(map(math.prod, shapes.SHAPES[shape.removesuffix("/compiled")]))
        num_contenders = sum(case.takes_part(each, with_compiled=compiled) for each in row.contenders)
        keeps = row.clip_share is not None or row.loss_scale != 1
        lists = 2 + keeps + 2 * num_contenders + 1
        if row.dtype == torch.float32:
            assert lists * 4 * elements <= 76 * 2**30, name


def test_the_byte_model_in_the_readme_is_what_the_script_prints() -> None:
    command = [sys.executable, str(GPU / "optimizers.py"), "--byte-model"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    readme = (GPU.parents[1] / "kernels" / "README.md").read_text(encoding="utf-8")
    assert readme.partition("<!-- bytes -->")[2].partition("<!-- /bytes -->")[0].strip() == printed
