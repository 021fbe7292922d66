"""The scripts for a GPU, as far as they can be run without one: the same code, on the emulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

GPU = Path(__file__).parents[1] / "benchmarks" / "gpu"


def test_the_shell_script_parses_and_refuses_a_part_that_it_does_not_have(tmp_path: Path) -> None:
    script = str(GPU / "run.sh")
    subprocess.run(["bash", "-n", script], check=True)
    environment = os.environ | {"OUT": str(tmp_path)}
    done = subprocess.run(
        ["bash", script, "optimisers"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no part optimisers" in done.stderr


def test_the_table_of_optimizers_is_rehearsed_on_the_emulated_device(tmp_path: Path) -> None:
    """Behind a case that ends its process in the middle, as a kernel that breaks the device would."""
    command = [sys.executable, str(GPU / "optimizers.py"), "--dry-run", "--out", str(tmp_path)]
    command += ["--minutes", "3", "--cases", "no-such-row/tiny", "B0/tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1, "a case failed"

    broken, measured = json.loads((tmp_path / "optimizers.json").read_text())["cases"]
    assert broken["case"] == "no-such-row/tiny" and "exited with 1" in broken["failure"]
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


def test_the_byte_model_in_the_readme_is_what_the_script_prints() -> None:
    command = [sys.executable, str(GPU / "optimizers.py"), "--byte-model"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    readme = (GPU.parents[1] / "kernels" / "README.md").read_text(encoding="utf-8")
    assert readme.partition("<!-- bytes -->")[2].partition("<!-- /bytes -->")[0].strip() == printed
