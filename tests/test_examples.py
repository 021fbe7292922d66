"""The examples under `diagnose run` are the programs that they are without it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.running import DIAGNOSE, PLAIN, REPOSITORY, Ended, run

EXAMPLES = REPOSITORY / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TWO_RANKS = ("--standalone", "--nproc-per-node", "2")

needs_pillow = pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed")
PICTURES = "--data pictures --train-pictures 96 --test-pictures 16 --batch-size 8 --epochs 2"

JOBS = (
    # The script, its arguments, and the optimizer steps that these make.
    pytest.param(
        "image_classifier.py",
        PICTURES,
        24,
        marks=[needs_pillow, pytest.mark.extended],
        id="image_classifier",
    ),
    pytest.param(
        "image_classifier.py",
        f"{PICTURES} --workers 2",
        24,
        marks=[needs_pillow, pytest.mark.extended],
        id="workers",
    ),
    pytest.param(
        "gpt_text.py",
        "--steps 20 --eval-every 10 --eval-batches 2",
        20,
        marks=pytest.mark.extended,
        id="gpt_text",
    ),
    pytest.param(
        "gpt_text.py",
        "--steps 20 --accumulate 3 --eval-every 7",
        20,
        marks=pytest.mark.extended,
        id="accumulation",
    ),
    pytest.param("tabular_mlp.py", "--rows 4000 --epochs 2", 58, id="tabular_mlp"),
    pytest.param("gan.py", "--images 1024 --epochs 2", 32, marks=pytest.mark.extended, id="gan"),
    pytest.param(
        "ddp.py", "--waves 960 --test-waves 32 --epochs 2", 60, marks=pytest.mark.extended, id="ddp-alone"
    ),
)


@pytest.mark.parametrize("script, arguments, steps", JOBS)
def test_an_example_prints_and_learns_the_same_and_every_step_is_found(script, arguments, steps, tmp_path):
    job = [EXAMPLES / script, *arguments.split(), "--save-weights"]
    plain = run_on_one_thread(*PLAIN, *job, "plain/weights.pt", cwd=folders(tmp_path))
    ours = run_on_one_thread(*DIAGNOSE, "--json", "report.json", *job, "ours/weights.pt", cwd=tmp_path)

    assert (ours.code, ours.stdout) == (plain.code, plain.stdout) and plain.code == 0, ours.stderr
    assert ours.stderr.startswith(plain.stderr)
    assert (tmp_path / "ours/weights.pt").read_bytes() == (tmp_path / "plain/weights.pt").read_bytes()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"]["count"] == steps
    shares = {phase["name"]: phase["share"] for phase in report["phases"]}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
    assert min(shares["forward"], shares["backward"], shares["optimizer"]) > 0


@pytest.mark.extended
def test_the_distributed_example_is_the_same_on_two_ranks(tmp_path):
    job = [EXAMPLES / "ddp.py", "--waves", "960", "--test-waves", "64", "--epochs", "2", "--save-weights"]
    plain = run_on_one_thread(*TORCHRUN, *job, "plain/weights.pt", cwd=folders(tmp_path))
    ours = run_on_one_thread(
        *DIAGNOSE, *TWO_RANKS, "--json", "report.json", *job, "ours/weights.pt", cwd=tmp_path
    )

    assert (ours.code, ours.stdout) == (plain.code, plain.stdout) and plain.code == 0, ours.stderr
    assert plain.stdout.startswith("960 waves, 2 ranks, 15 steps per epoch\n")
    assert (tmp_path / "ours/weights.pt").read_bytes() == (tmp_path / "plain/weights.pt").read_bytes()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["run"]["world_size"], report["steps"]["count"]) == (2, 30)
    shares = {phase["name"]: phase["share"] for phase in report["phases"]}
    assert shares["evaluation"] < shares["forward"], "one evaluated batch for fifteen trained ones"


@pytest.mark.extended
def test_an_example_gives_other_weights_for_another_seed(tmp_path):
    """Else equal weights would say nothing."""
    job = [EXAMPLES / "tabular_mlp.py", "--rows", "500", "--epochs", "1", "--save-weights"]
    run_on_one_thread(*PLAIN, *job, "plain/weights.pt", "--seed", "0", cwd=folders(tmp_path))
    run_on_one_thread(*PLAIN, *job, "ours/weights.pt", "--seed", "1", cwd=tmp_path)
    assert (tmp_path / "ours/weights.pt").read_bytes() != (tmp_path / "plain/weights.pt").read_bytes()


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_no_example_knows_of_diagnose(script):
    assert "diagnose" not in script.read_text()


def run_on_one_thread(*command: object, cwd: Path) -> Ended:
    """Several threads that wait for each other take minutes on a busy machine."""
    return run(*command, cwd=cwd, OMP_NUM_THREADS="1")


def folders(at: Path) -> Path:
    """Makes a folder for the weights of each arm: torch writes a file's own name into it."""
    (at / "plain").mkdir()
    (at / "ours").mkdir()
    return at
