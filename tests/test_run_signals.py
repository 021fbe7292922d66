"""Signals under `diagnose run`: the script gets each once, and we end as it ended."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.running import (
    BY_PATH,
    DIAGNOSE,
    PLAIN,
    environment,
    finish,
    has_ended,
    only_run,
    run_in_terminal,
    start,
    write,
)

CTRL_C, CTRL_BACKSLASH = "\x03", "\x1c"

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)\n"

COUNTS = r"""
import signal, time
seen = []
names = 'SIGINT SIGTERM SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGXCPU SIGALRM SIGRTMIN'
for name in names.split():
    signal.signal(signal.Signals[name], lambda number, frame: seen.append(signal.Signals(number).name))
print("ready", flush=True)
for _ in range(600):
    time.sleep(0.05)
    if seen:
        break
time.sleep(0.3)
print("", *seen, sep="\n")
raise SystemExit(9)
"""


def recorded(folder: Path) -> dict[str, object]:
    return json.loads((only_run(folder) / "run.json").read_text())


@pytest.mark.parametrize(
    "name",
    ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGRTMIN"],
)
def test_a_signal_sent_to_us_reaches_the_script_once_and_it_decides_what_follows(tmp_path, name):
    write(tmp_path / "job.py", COUNTS)
    process, _ = start(*DIAGNOSE, "job.py", cwd=tmp_path)
    process.send_signal(signal.Signals[name])
    ours = finish(process)
    assert (ours.code, ours.stdout) == (9, f"\n{name}\n")
    assert ours.stderr.startswith("\ndiagnose: ")
    assert recorded(tmp_path)["exit_code"] == 9


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGQUIT"])
def test_we_die_by_the_signal_that_the_script_dies_by(tmp_path, name):
    write(tmp_path / "job.py", SLEEPS)
    process, _ = start(*DIAGNOSE, "job.py", cwd=tmp_path)
    process.send_signal(signal.Signals[name])
    ours = finish(process)
    assert ours.code == -signal.Signals[name]
    assert ours.stderr.startswith(f"\ndiagnose: script ended by {name} before ")
    run_json = recorded(tmp_path)
    assert (run_json["exit_code"], run_json["signal"]) == (None, signal.Signals[name])


def test_a_job_ended_by_its_group_reports_too(tmp_path):
    write(tmp_path / "job.py", SLEEPS)
    process, _ = start(*DIAGNOSE, "job.py", cwd=tmp_path, start_new_session=True)
    os.killpg(process.pid, signal.SIGTERM)
    ours = finish(process)
    assert ours.code == -signal.SIGTERM
    assert ours.stderr.startswith("\ndiagnose: script ended by SIGTERM before ")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_sent_to_our_group_reaches_the_script_once(tmp_path, name):
    """As by `kill %1`, `timeout`, systemd and batch systems."""
    write(tmp_path / "job.py", COUNTS)
    process, _ = start(*DIAGNOSE, "job.py", cwd=tmp_path, start_new_session=True)
    os.killpg(process.pid, signal.Signals[name])
    ours = finish(process)
    assert (ours.code, ours.stdout) == (9, f"\n{name}\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_script_that_has_left_our_group_gets_what_is_sent_to_the_group(tmp_path):
    write(tmp_path / "job.py", "import os\nos.setpgrp()\n" + COUNTS)
    process, _ = start(*DIAGNOSE, "job.py", cwd=tmp_path, start_new_session=True)
    os.killpg(process.pid, signal.SIGTERM)
    ours = finish(process)
    assert (ours.code, ours.stdout) == (9, "\nSIGTERM\n")


@pytest.mark.parametrize("closed", ["<&-", "<&- 2>&-"])
def test_without_standard_streams_a_signal_to_the_group_still_comes_once(tmp_path, closed):
    write(tmp_path / "job.py", COUNTS)
    command = shlex.join(map(str, (*DIAGNOSE, "job.py")))
    process, _ = start("sh", "-c", f"exec {command} {closed}", cwd=tmp_path, start_new_session=True)
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process).stdout == "\nSIGTERM\n"


def test_what_torchrun_sends_to_the_whole_group_reaches_the_script_once(tmp_path):
    """It starts each rank so, and ends it so."""
    write(tmp_path / "job.py", COUNTS)
    env = environment(TORCHELASTIC_RUN_ID="none")
    process, _ = start(*DIAGNOSE, "job.py", cwd=tmp_path, env=env, start_new_session=True)
    os.killpg(process.pid, signal.SIGTERM)
    ours = finish(process)
    assert (ours.code, ours.stdout) == (9, "\nSIGTERM\n")


def test_ctrl_c_interrupts_the_script_once_as_under_plain_python(tmp_path):
    write(tmp_path / "job.py", "import time; print('ready', flush=True); time.sleep(60)\n")
    plain = run_in_terminal(*PLAIN, "job.py", cwd=tmp_path, keys={"ready": CTRL_C})
    ours = run_in_terminal(*DIAGNOSE, "job.py", cwd=tmp_path, keys={"ready": CTRL_C})
    assert ours.code == plain.code == -signal.SIGINT
    start_line, _, rest = ours.stdout.partition("\n")
    assert start_line == (
        f"diagnose: run {only_run(tmp_path).name}  recording to .diagnose/runs; "
        "Ctrl-C stops the script as usual"
    )
    assert rest.startswith(plain.stdout + "\n"), "the traceback of plain Python, then a blank line"
    assert "script ended by SIGINT before " in rest[len(plain.stdout) :]


@pytest.mark.parametrize("key, name", [(CTRL_C, "SIGINT"), (CTRL_BACKSLASH, "SIGQUIT")])
def test_a_key_reaches_a_script_that_handles_it_once(tmp_path, key, name):
    write(tmp_path / "job.py", COUNTS)
    ours = run_in_terminal(*DIAGNOSE, "job.py", cwd=tmp_path, keys={"ready": key})
    assert ours.code == 9
    assert [line for line in ours.stdout.splitlines() if line.startswith("SIG")] == [name]


def test_a_second_ctrl_c_gets_through_too(tmp_path):
    write(
        tmp_path / "job.py",
        """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("cleaning up", flush=True)
    time.sleep(60)
""",
    )
    keys = {"ready": CTRL_C, "cleaning up": CTRL_C}
    ours = run_in_terminal(*DIAGNOSE, "job.py", cwd=tmp_path, keys=keys)
    assert ours.code == -signal.SIGINT
    assert ours.stdout.count("KeyboardInterrupt") == 2


SLOW_REPORT = f"""
import time, diagnose.launch.ending

def report(*_):
    print("reporting")
    time.sleep(2)

diagnose.launch.ending._conclude = report
{BY_PATH}
"""


def test_ctrl_c_in_our_report_ends_the_report_but_not_the_exit_code(tmp_path):
    write(tmp_path / "job.py", "raise SystemExit(9)")
    command = (sys.executable, "-uc", SLOW_REPORT, "run", "job.py")
    ours = run_in_terminal(*command, cwd=tmp_path, keys={"reporting": CTRL_C})
    assert ours.code == 9
    assert ours.stdout.endswith(
        f"diagnose: the report was interrupted; to see it: diagnose report {only_run(tmp_path).name}\n"
    )


def test_a_signal_that_comes_too_late_for_the_script_does_not_end_us_before_our_report(tmp_path):
    write(tmp_path / "job.py", "raise SystemExit(9)")
    process, line = start(sys.executable, "-uc", SLOW_REPORT, "run", "job.py", cwd=tmp_path)
    assert line == "reporting\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 9


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_what_nohup_or_a_background_job_ignores_stays_ignored(tmp_path, name):
    write(tmp_path / "job.py", "import time; print('ready', flush=True); time.sleep(1); print('done')")
    number = signal.Signals[name]
    process, _ = start(
        *DIAGNOSE,
        "job.py",
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )
    os.killpg(process.pid, number)
    ours = finish(process)
    assert (ours.code, ours.stdout) == (0, "done\n")


def test_a_launcher_that_ignores_its_children_does_not_hide_the_exit_code(tmp_path):
    write(tmp_path / "job.py", "print('ready', flush=True); raise SystemExit(9)")
    process, _ = start(
        *DIAGNOSE, "job.py", cwd=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    assert finish(process).code == 9


def test_stopping_and_continuing_the_job_loses_nothing(tmp_path):
    write(
        tmp_path / "job.py", "import time; print('ready', flush=True); time.sleep(0.5); raise SystemExit(9)"
    )
    process, _ = start(*DIAGNOSE, "job.py", cwd=tmp_path, start_new_session=True)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(0.7)
    os.killpg(process.pid, signal.SIGCONT)
    assert finish(process).code == 9


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_no_script_trains_on_when_we_are_killed(tmp_path):
    write(tmp_path / "job.py", SLEEPS)
    process, pid = start(*DIAGNOSE, "job.py", cwd=tmp_path)
    process.kill()
    assert has_ended(int(pid), within_s=10)
    assert finish(process).code == -signal.SIGKILL
