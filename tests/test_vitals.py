"""What is read of the operating system: that it is cheap, that it grows, and quotas in both interfaces."""

from __future__ import annotations

import cProfile
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diagnose
from diagnose.analysis.loading import reading_rates
from diagnose.analysis.program import memory_of
from diagnose.analysis.readings import vitals_of
from diagnose.analysis.signals import host_stats, python_threads
from diagnose.core.ledger import COLUMNS
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.torch_settings import TorchSettingsHook, _function_of, settings_now
from diagnose.launch import quota, vitals
from diagnose.store.reader import RankLog, read_rank
from diagnose.store.writer import Writer
from tests.running import comes_true

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="readings of Linux")

MS = 1_000_000


def burn(seconds: float) -> None:
    """Uses a CPU for so long, by its own clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads that wait."""
    over = threading.Event()
    waiting = [threading.Thread(target=over.wait, name=f"waits-{i}") for i in range(count)]
    for thread in waiting:
        thread.start()
    yield
    over.set()
    for thread in waiting:
        thread.join()


def test_a_reading_is_of_plain_numbers_and_takes_well_under_a_millisecond():
    with threads(8):
        first = vitals.read(threading.get_ident())
        assert json.loads(json.dumps(first)).keys() == first.keys()
        begun = time.thread_time_ns()
        for _ in range(50):
            vitals.read(threading.get_ident())
        spent_ns = (time.thread_time_ns() - begun) / 50
    assert spent_ns < 1 * MS, "0.17 ms on an idle machine, by the thread's own clock"


def test_totals_grow_with_the_work_of_the_training_thread():
    before = vitals.read(threading.get_ident())
    burn(0.05)
    time.sleep(0.01)
    after = vitals.read(threading.get_ident())
    assert after["thread_cpu_ns"] - before["thread_cpu_ns"] >= 40 * MS
    assert after["cpu_ns"] - before["cpu_ns"] >= 40 * MS
    assert after["voluntary"] > before["voluntary"], "it slept"
    assert after["machine_busy_ns"] > before["machine_busy_ns"]


def test_the_main_thread_of_a_fork_is_read_as_its_own():
    burn(0.05)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            burn(0.02)
            os.write(writer, json.dumps(vitals.read(threading.get_ident())).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        readings = json.load(answer)
    os.waitpid(child, 0)
    assert 10 * MS < readings["thread_cpu_ns"] < 1000 * MS, "its own time, not that of its parent"
    assert readings["thread_delay_ns"] >= 0


def test_another_python_thread_is_named_with_its_function_and_its_cpu_time():
    over = threading.Event()

    def watch() -> None:
        burn(0.1)
        over.wait()

    thread = threading.Thread(target=watch, name="watcher")
    thread.start()
    try:
        time.sleep(0.4)
        ours = vitals.read(threading.get_ident())["python_threads"][str(thread.native_id)]
    finally:
        over.set()
        thread.join()
    assert ours[0] == "watcher"
    assert (ours[1], ours[2]) == (watch.__code__.co_filename, watch.__code__.co_firstlineno)
    assert ours[3] > 20 * MS


def cpu_of_children_ns() -> int:
    return int(vitals.read(threading.get_ident())["child_cpu_ns"])


def test_children_count_while_they_live_and_after_they_have_ended():
    code = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass\ninput()"
    before = cpu_of_children_ns()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert comes_true(lambda: cpu_of_children_ns() - before >= 200 * MS)
    living = cpu_of_children_ns()
    child.communicate(b"\n")
    assert cpu_of_children_ns() >= living - 20 * MS


def test_modes_of_torch_are_seen_from_another_thread():
    seen = []
    with torch.autograd.set_detect_anomaly(True):
        reader = threading.Thread(target=lambda: seen.append(vitals.read(0)))
        reader.start()
        reader.join()
    assert seen[0]["anomaly"] == 1
    assert vitals.read(0)["anomaly"] == 0


def test_threads_that_come_and_go_are_counted_once_each():
    rows = [
        {"python_threads": {"7": ["a", "f.py", 3, 100]}},
        {"python_threads": {"7": ["a", "f.py", 3, 400], "8": ["b", "", 0, 50]}},
        {"python_threads": {"8": ["b", "", 0, 250]}},
    ]
    found = python_threads(rows, 1000)
    assert [(thread.name, thread.cpus) for thread in found] == [("a", 0.3), ("b", 0.25)]


def stat(*cores: tuple[int, int]) -> str:
    """`/proc/stat` of some cores: their busy and idle ticks, half of the busy ones in the kernel."""
    each = [(busy // 2, 0, busy - busy // 2, idle, 5, 0, 0, 0, 0, 0) for busy, idle in cores]
    lines = ["cpu " + " ".join(map(str, map(sum, zip(*each, strict=True))))]
    lines += [f"cpu{core} " + " ".join(map(str, ticks)) for core, ticks in enumerate(each)]
    return "\n".join([*lines, "intr 123 4 5", "ctxt 6"])


def test_a_single_full_core_is_seen_among_idle_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    cores = vitals._Cores()
    assert cores.read(stat((100, 100), (100, 100), (100, 100), (0, 0))) == {}
    now = cores.read(stat((150, 100), (110, 140), (100, 150), (999, 0)))
    assert now == {"busiest_core_share": 1.0, "full_cores": 1}, "the last one is not this process's to use"
    assert cores.read(stat((150, 150), (135, 165), (100, 200), (999, 0)))["busiest_core_share"] == 0.5
    assert cores.read(stat((150, 150), (135, 165), (100, 200), (999, 0))) == {}, "no tick has passed"


def test_what_the_kernel_does_for_a_child_is_told_from_what_it_does_for_others():
    before = vitals.read(threading.get_ident())
    calls = "import os, time\nwhile time.process_time() < 0.4: os.stat('/')"
    subprocess.run([sys.executable, "-c", calls], check=True)
    after = vitals.read(threading.get_ident())
    own, all_ = (after[name] - before[name] for name in ("kernel_ns", "machine_kernel_ns"))
    assert 40 * MS <= own <= after["child_cpu_ns"] - before["child_cpu_ns"] + 200 * MS
    assert all_ >= own - 60 * MS, "both are counted in ticks"


def test_what_a_child_wrote_that_has_ended_is_not_the_processs(tmp_path: Path):
    """The kernel adds it to its sum for the process once that has waited for the child."""
    write = f"import os; file = open({str(tmp_path / 'file')!r}, 'wb'); file.write(bytes(1 << 22));"
    before = vitals.read(threading.get_ident())
    if "written_bytes" not in before:
        pytest.skip("this kernel does not tell")
    subprocess.run([sys.executable, "-c", f"{write} os.fsync(file.fileno())"], check=True)
    after = vitals.read(threading.get_ident())
    assert after["written_bytes"] - before["written_bytes"] < 1 << 20


def test_bytes_written_to_storage_are_read(tmp_path: Path):
    before = vitals.read(threading.get_ident())
    if "written_bytes" not in before:
        pytest.skip("this container hides /proc/self/io")
    with open(tmp_path / "file", "wb") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        os.fsync(file.fileno())
    written = vitals.read(threading.get_ident())["written_bytes"] - before["written_bytes"]
    assert written >= 1 << 20 or not before["written_bytes"], "a file system in memory writes nothing"


# -- quotas


def test_a_run_shorter_than_a_flush_is_read_once_at_its_end(tmp_path: Path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnose.attach(tmp_path)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    diagnose.detach()
    (reading,) = read_rank(tmp_path / "rank0.sqlite").vitals
    assert reading[1] in (2, 3)
    assert reading[2]["own_bytes"] > 1_000_000


def test_a_quota_of_version_2_is_read_with_what_it_stopped(tmp_path: Path):
    group = tmp_path / "fs" / "docker" / "abc"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "cpu.stat").write_text("usage_usec 9\nnr_periods 40\nnr_throttled 30\nthrottled_usec 700\n")
    (tmp_path / "own").write_text("0::/docker/abc\n")
    read = quota.read(tmp_path / "own", tmp_path / "fs")
    assert read == {"quota": 1.5, "periods": 40, "throttled": 30, "throttled_ns": 700_000}


def test_a_quota_of_version_1_may_be_a_parents(tmp_path: Path):
    parent = tmp_path / "fs" / "cpu" / "pod"
    (parent / "container").mkdir(parents=True)
    for folder, limit in ((parent, 200_000), (parent / "container", -1)):
        (folder / "cpu.cfs_quota_us").write_text(f"{limit}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        (folder / "cpu.stat").write_text("nr_periods 10\nnr_throttled 2\nthrottled_time 5\n")
    (tmp_path / "own").write_text("4:cpu,cpuacct:/pod/container\n1:name=systemd:/\n")
    read = quota.read(tmp_path / "own", tmp_path / "fs")
    assert read == {"quota": 2.0, "periods": 10, "throttled": 2, "throttled_ns": 5}


@pytest.mark.parametrize(
    ("own", "folder", "name"),
    [
        ("0::/slurm/job", "slurm", "cpuset.cpus.effective"),
        ("3:cpuset:/slurm/job", "cpuset/slurm", "cpuset.effective_cpus"),
    ],
)
def test_the_cpus_that_a_group_may_be_bound_to_are_counted(
    own: str, folder: str, name: str, tmp_path: Path
):
    group = tmp_path / "fs" / folder
    (group / "job").mkdir(parents=True)
    (group / name).write_text("0-3,8,10-11\n")
    (group / "job" / name).write_text("\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert quota.cpuset(tmp_path / "own", tmp_path / "fs") == 7
    (group / name).write_text("what?\n")
    assert quota.cpuset(tmp_path / "own", tmp_path / "fs") is None


def test_this_process_is_not_bound_to_more_cpus_than_its_group():
    cpus = quota.cpuset()
    assert cpus is None or len(os.sched_getaffinity(0)) <= cpus


def test_a_quota_is_known_from_the_first_reading_on_and_an_older_run_has_none():
    steps = np.empty((0, len(COLUMNS)), dtype=np.int64)
    readings = [(0, 0, {"cpu_ns": 5, "quota": 2.0})]
    new = RankLog(path=Path("new"), meta={"cpus": 8, "cpuset_cpus": 16}, steps=steps, vitals=readings)
    old = RankLog(path=Path("old"), meta={"cpus": 8}, steps=steps)
    assert (host_stats(new, 0).usable_cpus, host_stats(new, 0).cpuset_cpus) == (2.0, 16)
    assert (host_stats(old, 0).usable_cpus, host_stats(old, 0).cpuset_cpus) == (8, None)


def test_without_a_quota_nothing_is_said(tmp_path: Path):
    (tmp_path / "fs").mkdir()
    (tmp_path / "own").write_text("0::/\n")
    assert quota.read(tmp_path / "own", tmp_path / "fs") == {}


# -- settings


def test_settings_are_those_of_the_thread_that_trains(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    recorder = Recorder()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model.register_forward_hook(lambda *_: None)
    recorder.met.model_appears(model)
    settings = settings_now(recorder)
    assert settings["num_threads"] == torch.get_num_threads()
    assert settings["cpus"] == len(os.sched_getaffinity(0))
    assert (settings["omp_num_threads"], settings["local_processes"]) == (3, 2)
    assert settings["bound_by"] == "KMP_AFFINITY"
    assert (settings["num_leaf_modules"], settings["num_module_hooks"]) == (2, 1)


def test_what_lets_threads_sleep_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", " PASSIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert settings_now(Recorder())["sleeps_by"] == "OMP_WAIT_POLICY=passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("GOMP_SPINCOUNT", "300000")
    assert settings_now(Recorder())["sleeps_by"] == ""


def test_a_trace_function_is_named():
    previous = sys.getprofile()
    sys.setprofile(burn_nothing)
    try:
        found = settings_now(Recorder())
        assert (found["trace"], found["trace_function"]) == (__name__, "burn_nothing")
    finally:
        sys.setprofile(previous)


class Edges:
    """Notes calls, as a script's own profiler does."""

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """Notes nothing."""

    def note(self, frame: Any, event: str, arg: Any) -> None:
        """Likewise."""


@pytest.mark.parametrize(
    ("tracer", "function"),
    [
        (Edges(), "Edges.__call__"),
        (Edges().note, "Edges.note"),
        (cProfile.Profile(), ""),
        (functools.partial(print), ""),
    ],
)
def test_what_is_called_for_each_call_is_told_by_the_name_of_its_function(tracer: Any, function: str):
    told = function if sys.version_info >= (3, 11) else function.rpartition(".")[2]
    assert _function_of(tracer) == told


def test_what_the_scripts_profiler_records_besides_is_known():
    recorder = Recorder()
    before = torch.autograd.profiler.profile._start_trace
    with TorchSettingsHook().install(recorder):
        with torch.profiler.profile(with_flops=True, profile_memory=True):
            (inspect,) = recorder.looks.inspections
            inspect()
        assert recorder.facts["settings"]["recorded"] == ["record_shapes", "profile_memory"]
    assert torch.autograd.profiler.profile._start_trace is before


@pytest.mark.parametrize("more", [0, 1])
def test_a_number_of_threads_that_the_script_sets_is_told(more: int):
    recorder, before = Recorder(), torch.get_num_threads()
    try:
        with TorchSettingsHook().install(recorder):
            torch.set_num_threads(before + more)
            (inspect,) = recorder.looks.inspections
            inspect()
    finally:
        torch.set_num_threads(before)
    assert recorder.facts["settings"]["sets_threads"] is bool(more)


def burn_nothing(*_: object) -> None:
    """Stands for a profiler."""


def test_the_settings_hook_takes_its_inspection_back():
    recorder = Recorder()
    with TorchSettingsHook().install(recorder):
        (inspect,) = recorder.looks.inspections
        inspect()
    assert recorder.looks.inspections == []
    assert "num_threads" in recorder.facts["settings"]


def test_what_the_script_does_after_its_training_is_no_part_of_the_readings(tmp_path: Path):
    def reading(time_ms: int, step: int, *, cpu_ms: int, read: int) -> tuple[int, int, dict[str, int]]:
        own = {
            "thread_cpu_ns": cpu_ms * MS,
            "thread_delay_ns": 0,
            "own_bytes": read,
            "resident_bytes": read,
        }
        return time_ms * MS, step, {**own, "read_bytes": read, "minor_faults": read // 4096}

    training = [reading(500 * i, 10 * i, cpu_ms=400 * i, read=10**6 * i) for i in range(21)]
    testing = [reading(10_000 + 500 * i, 200, cpu_ms=8000, read=10**9 * i) for i in range(1, 41)]
    alone = RankLog(path=tmp_path, steps=np.empty((0, len(COLUMNS)), dtype=np.int64), vitals=training)
    whole = replace(alone, vitals=training + testing)
    assert host_stats(whole, 10) == host_stats(alone, 10)
    assert host_stats(whole, 10).on_cpu_share == pytest.approx(0.8)
    assert memory_of(whole, 10) == memory_of(alone, 10)
    assert reading_rates(whole, 200) == reading_rates(alone, 200)

    writer = Writer(tmp_path, 0)
    for row in training + testing:
        writer.add_vitals(*row)
    writer.close()
    brief = read_rank(tmp_path / "rank0.sqlite", brief_from=10)
    assert brief.vitals[-1] == training[-1]
    assert host_stats(brief, 10).on_cpu_share == pytest.approx(0.8)


def test_readings_right_after_each_other_tell_no_rate() -> None:
    """The machine counts in ticks: one tick in 2 ms would be five CPUs."""
    totals = [
        (t, {"cpu_ns": t, "machine_busy_ns": t // 10_000_000 * 10_000_000})
        for t in (0, 500_000_000, 502_000_000)
    ]
    vitals = vitals_of([(t, 0, told) for t, told in totals], 0, {})
    assert np.isfinite(vitals.busy_cpus).tolist() == [False, True, False]
