"""Real runs: figures of one, and what becomes of those that fail, never end, or are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnose.core.phases import Phase
from diagnose.gate import instructions, measure
from diagnose.gate.fingerprint import fingerprint_of, machine_facts
from diagnose.gate.history_why import phase_times
from diagnose.gate.measure import OutOfTime, RunPlan, measured_run
from diagnose.gate.result import Metric, Side, TrainingFailed
from tests.gates import git, repository
from tests.running import environment, has_ended, run

DIAGNOSE = (sys.executable, "-m", "diagnose")


def test_a_real_command_that_fails_is_shown_with_the_end_of_its_stderr(tmp_path: Path) -> None:
    script = "import sys; print('Schöne Grüße: it broke', file=sys.stderr); sys.exit(7)"
    (tmp_path / "a.py").write_text(script)
    command = ("gate", "--base-cmd", "a.py", "--head-cmd", "a.py", "--json", "-")
    ended = run(*DIAGNOSE, *command, cwd=tmp_path)
    assert ended.code == 5
    answer = json.loads(ended.stdout)
    assert answer["failure"]["exit_code"] == 7
    assert answer["failure"]["last_lines"] == ["Schöne Grüße: it broke"]
    assert "THE TRAINING COMMAND FAILED: base-00 ended with exit code 7" in ended.stderr


def test_a_command_that_never_trains_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('hello')")
    ended = run(*DIAGNOSE, "gate", "--base-cmd", "a.py", "--head-cmd", "a.py", cwd=tmp_path)
    assert ended.code == 3
    assert "no optimizer step was seen" in ended.stdout
    assert "diagnose.step()" in ended.stdout


def sleeping_gate(folder: Path, command: tuple[str, ...] = DIAGNOSE) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a gate whose training sleeps; returns it, and the training's process, once that one runs."""
    mark = folder / "pid.txt"
    text = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    repository(folder, text, text)
    process = subprocess.Popen(
        [*command, "gate", "--ab", "main~1..main", "--", "train.py"],
        cwd=folder,
        env=environment(TMPDIR=str(folder)),
        stderr=subprocess.DEVNULL,
    )
    for _ in range(600):
        if mark.exists() and mark.read_text():
            return process, int(mark.read_text())
        time.sleep(0.05)
    raise AssertionError("the training never began")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_a_gate_that_is_ended_leaves_no_process_and_no_worktree(tmp_path: Path, number: int) -> None:
    process, training = sleeping_gate(tmp_path)
    assert git(tmp_path, "worktree", "list").count("\n") == 2
    process.send_signal(number)
    codes = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert process.wait(timeout=30) == codes[signal.Signals(number)]
    assert has_ended(training, within_s=20)
    for _ in range(400):
        if git(tmp_path, "worktree", "list").count("\n") == 0 and not list(
            tmp_path.glob("diagnose-gate-*")
        ):
            return
        time.sleep(0.05)
    raise AssertionError(git(tmp_path, "worktree", "list"))


COUNTED = "task-clock"
"""An event that every `perf` can count, also where there are no counters of instructions."""

COUNTING = f"""
from diagnose.gate import instructions
instructions.EVENT = {COUNTED!r}
assert instructions.counting(instructions.Path("/dev/null"))
from diagnose.cli.main import main
main()
"""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the gate put its runs under `perf stat`."""
    monkeypatch.setattr(instructions, "EVENT", COUNTED)
    instructions._perf.cache_clear()
    if not instructions.counting(Path("/dev/null")):
        pytest.skip("there is no perf that counts here")
    yield
    instructions._perf.cache_clear()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda each: each.name)
def test_a_training_killed_under_perf_has_not_ended_well(
    tmp_path: Path, counted: None, number: signal.Signals
) -> None:
    (tmp_path / "a.py").write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    side = Side(label="base", name="a", root=tmp_path, command=("a.py",))
    with pytest.raises(TrainingFailed) as failed:
        measured_run(side, "base-00", tmp_path / "runs", RunPlan())
    assert failed.value.failure.signal == number
    assert failed.value.failure.reason == f"base-00 was ended by signal {int(number)} ({number.name})"


def test_a_run_whose_supervisor_is_killed_under_perf_has_not_ended_well(
    tmp_path: Path, counted: None
) -> None:
    (tmp_path / "a.py").write_text("import os, time; os.kill(os.getppid(), 9); time.sleep(60)")
    side = Side(label="base", name="a", root=tmp_path, command=("a.py",))
    with pytest.raises(TrainingFailed, match="base-00 left no record of how it ended"):
        measured_run(side, "base-00", tmp_path / "runs", RunPlan())


def test_a_command_that_fails_under_perf_keeps_its_exit_code(tmp_path: Path, counted: None) -> None:
    (tmp_path / "a.py").write_text("raise SystemExit(7)")
    side = Side(label="base", name="a", root=tmp_path, command=("a.py",))
    with pytest.raises(TrainingFailed) as failed:
        measured_run(side, "base-00", tmp_path / "runs", RunPlan())
    assert failed.value.failure.exit_code == 7
    assert instructions.count_of(tmp_path / "runs" / "base-00.perf")


def test_a_gate_that_is_killed_takes_perf_and_the_training_with_it(tmp_path: Path, counted: None) -> None:
    process, training = sleeping_gate(tmp_path, (sys.executable, "-c", COUNTING))
    parents = ancestors(training)
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in parents]
    assert "perf" in names, "or this tests nothing"
    process.kill()
    process.wait(timeout=30)
    assert has_ended(training, within_s=20)
    for pid in parents[: parents.index(process.pid)]:
        assert has_ended(pid, within_s=20)


def ancestors(pid: int) -> list[int]:
    """The processes that a process descends from, nearest first."""
    found = []
    while pid > 1:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pid = int(fields[1])
        found.append(pid)
    return found


def test_two_gates_at_once_do_not_meet(tmp_path: Path) -> None:
    script = "import os, sys, time; print(os.getcwd(), file=sys.stderr); time.sleep(1); sys.exit(3)"
    repository(tmp_path, script, script)
    command = [*DIAGNOSE, "gate", "--ab", "main~1..main", "--json", "-", "--", "train.py"]
    both = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for _ in range(2)
    ]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    assert [process.returncode for process in both] == [5, 5]
    assert answers[0]["folder"] != answers[1]["folder"]
    assert answers[0]["failure"]["last_lines"] != answers[1]["failure"]["last_lines"], "the same worktree"
    assert git(tmp_path, "worktree", "list").count("\n") == 0


@pytest.mark.parametrize("stands_in", ["elsewhere", "the folder by a link", "nowhere"])
def test_a_run_is_told_of_its_own_folder_by_the_shells_variable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands_in: str
) -> None:
    """Else a script that reads its settings by `$PWD` would read the working copy's in both versions."""
    root, shell = tmp_path / "worktree", tmp_path / stands_in
    root.mkdir()
    if "link" in stands_in:
        shell.symlink_to(root)
    elif stands_in == "elsewhere":
        shell.mkdir()
    (root / "a.py").write_text("import os; open('pwd.txt', 'w').write(os.environ['PWD'])")
    monkeypatch.setenv("PWD", str(shell))
    side = Side(label="base", name="a", root=root, command=("a.py",))
    measured_run(side, "base-00", tmp_path / "runs", RunPlan())
    assert (root / "pwd.txt").read_text() == str(shell if "link" in stands_in else root)


STARTS_A_RANK = """
import signal, subprocess, sys, time
before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
if sys.argv[1] == "ends":
    signal.signal(signal.SIGTERM, before)
print(rank.pid, flush=True)
time.sleep(60)
"""
"""As torchrun does, in a session of its own; neither SIGTERM nor its parent's end moves it."""


@pytest.mark.parametrize("agent", ["ends", "hangs"])
def test_a_run_that_is_ended_leaves_no_rank(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "GRACE_S", 0.3)
    command = [sys.executable, "-S", "-E", "-c", STARTS_A_RANK, agent]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        measure._end(process)
    assert process.returncode == (-signal.SIGTERM if agent == "ends" else -signal.SIGKILL)
    assert has_ended(rank, within_s=10)


@pytest.mark.extended
def test_a_run_that_is_out_of_time_is_ended(tmp_path: Path) -> None:
    script = "import sys, time; print('waiting', file=sys.stderr, flush=True); time.sleep(60)"
    (tmp_path / "a.py").write_text(script)
    side = Side(label="base", name="a", root=tmp_path, command=("a.py",))
    begun = time.monotonic()
    with pytest.raises(OutOfTime) as late:
        measured_run(side, "base-00", tmp_path / "runs", RunPlan(timeout_s=5.0))
    assert time.monotonic() - begun < 30
    assert late.value.last_lines[:1] == ("waiting",)


TRAINING = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(1600, 64))
for epoch in range(1000):
    for (x,) in torch.utils.data.DataLoader(data, 16):
        {work}
        optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
"""


def test_a_real_run_has_every_figure(tmp_path: Path) -> None:
    """In a folder with settings, and with modules that bear our names, which must not be taken for ours."""
    (tmp_path / "diagnose.py").write_text("raise SystemExit('the wrong diagnose')")
    (tmp_path / "pyproject.toml").write_text("[tool.diagnose]\nsteps = 100\n")
    (tmp_path / "train.py").write_text(TRAINING.format(work="__import__('time').sleep(0.01)"))
    side = Side(label="head", name="a", root=tmp_path, command=("train.py",))
    ours = b"1" * (1 << 30)  # Linux counts for a new process what the one that started it used
    plan = RunPlan(steps=450, finds_warmup=True, timeout_s=60.0)
    measured = measured_run(side, "head-00", tmp_path / "runs", plan)
    figures = measured.figures
    assert set(figures) >= {
        Metric.SAMPLES_PER_S,
        Metric.MEAN_SAMPLES_PER_S,
        Metric.STEP_MS,
        Metric.CPU_MS,
        Metric.PEAK_MEMORY,
        Metric.STARTUP,
    }
    assert figures[Metric.SAMPLES_PER_S] == pytest.approx(16_000 / figures[Metric.STEP_MS], rel=0.01)
    assert figures[Metric.STEP_MS] > 10
    assert figures[Metric.CPU_MS] > 0
    assert 50e6 < figures[Metric.PEAK_MEMORY] < len(ours)
    assert 0 < figures[Metric.STARTUP] < measured.wall_s
    assert measured.warmup >= 20
    assert measured.num_steps + measured.warmup == 470
    phases = phase_times([measured])
    assert sum(phases.values()) == pytest.approx(figures[Metric.STEP_MS], rel=0.05)
    assert phases[Phase.OTHER] > 10 > phases[Phase.FORWARD] > 0
    facts = fingerprint_of(measured.folder, side.command)
    assert facts.hard["dtype"] == "float32"
    assert facts.hard == {**facts.hard, **machine_facts()}, "the run is of our own environment"
    assert facts.soft["torch_threads"] == 1


@pytest.mark.extended
def test_two_real_commits_to_an_exit_code(tmp_path: Path) -> None:
    repository(
        tmp_path,
        TRAINING.format(work="pass"),
        TRAINING.format(work="torch.randn(400, 400) @ x.new_ones(400, 400)"),
    )
    call = ("gate", "--steps", "60", "--ab", "main~1..main", "--json", "out.json", "--", "train.py")
    ended = subprocess.run(
        [*DIAGNOSE, *call], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=1200
    )
    assert ended.returncode == 1, ended.stdout
    answer = json.loads((tmp_path / "out.json").read_text())
    assert answer["drop"] > 0.2
    assert "train.py" in {reason["file"] for reason in answer["why"]}
