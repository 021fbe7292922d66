"""The sampler: sees Python, sleep and C alike, finds the line, and says where it cannot."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diagnose.core.ledger import SLOT_OF
from diagnose.hooks._frames import resolve
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._sampler import INTERVAL_NS, Sampler
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files
from tests.running import run, write

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernel timers are Linux's"),
]

FILE = str(Path(__file__))


@contextmanager
def sampling() -> Iterator[tuple[Recorder, Sampler]]:
    """Samples the test, as a session does: with an interval that a thread draws anew now and then."""
    recorder = Recorder()
    recorder.steps = 1_000_000  # short ones: of long ones it would take fewer samples
    sampler = Sampler(recorder)
    over = threading.Event()

    def vary() -> None:
        while not over.wait(0.1):
            sampler.vary()

    thread = threading.Thread(target=vary)
    sampler.start()
    assert not sampler.missing
    thread.start()
    try:
        yield recorder, sampler
    finally:
        over.set()
        thread.join()
        sampler.stop()


def sampled(recorder: Recorder) -> Counter[tuple[int, ...]]:
    """Sampled nanoseconds by slot and stack."""
    totals: Counter[tuple[int, ...]] = Counter()
    for _, weight_ns, ticks, key in recorder.log.sampled:
        assert ticks > 0
        totals[key] += weight_ns
    return totals


def time_by(recorder: Recorder, key: Callable[[str, int, str], str]) -> Counter[str]:
    """Sampled seconds by something of the innermost frame of this file."""
    totals: Counter[str] = Counter()
    for sample, weight_ns in sampled(recorder).items():
        frames = [resolve(*sample[i : i + 2]) for i in range(3, len(sample), 2)]
        totals[key(*frames[0]) if frames else ""] += weight_ns / 1e9
    return totals


def by_function(recorder: Recorder) -> Counter[str]:
    return time_by(recorder, lambda file, line, function: function.rpartition(".")[2])


def in_python(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def in_sleep(seconds: float) -> None:
    time.sleep(seconds)


BYTES, LONG = bytes(3_000_000), bytes(100_000_000)


def in_c(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        hashlib.sha256(BYTES)  # some milliseconds without the interpreter lock


def test_time_in_python_in_sleep_and_in_c_is_seen_alike():
    took: Counter[str] = Counter()
    with sampling() as (recorder, _):
        end = time.perf_counter() + 4
        while time.perf_counter() < end:
            for work, seconds in ((in_python, 0.006), (in_sleep, 0.009), (in_c, 0.012)):
                begun = time.perf_counter()
                work(seconds)
                took[work.__name__] += time.perf_counter() - begun
    seen = by_function(recorder)
    total, total_seen = sum(took.values()), sum(seen.values())
    assert total_seen == pytest.approx(total, rel=0.1)
    for name, seconds in took.items():
        assert seen[name] / total_seen == pytest.approx(seconds / total, abs=0.03), name


def test_one_call_into_c_that_outlasts_many_ticks_weighs_as_many():
    took: Counter[str] = Counter()
    with sampling() as (recorder, sampler):
        for _ in range(3):
            begun = time.perf_counter()
            time.sleep(0.2)
            slept = time.perf_counter()
            took["sleep"] += slept - begun
            sum(range(9_000_000))
            took["sum"] += time.perf_counter() - slept
            added = time.perf_counter()
            hashlib.sha256(LONG)
            took["hash"] += time.perf_counter() - added
    seen = time_by(recorder, lambda file, line, function: str(line))
    calls = {"sleep": "time.sleep(0.2)", "sum": "sum(range(9_000_000))", "hash": "hashlib.sha256(LONG)"}
    for name, text in calls.items():
        assert seen[str(line_of(text))] == pytest.approx(took[name], rel=0.1, abs=0.01), name
    assert sampler.count < sum(took.values()) / (min(INTERVAL_NS) / 1e9)


def line_of(text: str) -> int:
    """The number of the line of this file that is, or ends in, a text."""
    source = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(source, 1) if line.strip() == text or line.endswith(f"  {text}"))


def test_the_line_and_the_function_that_spend_the_time_are_found():
    def innermost() -> None:
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            sum(range(100))  # the line

    def caller() -> None:
        innermost()

    with sampling() as (recorder, _):
        caller()
    seen = time_by(recorder, lambda file, line, function: f"{file}:{line}")
    assert seen[f"{FILE}:{line_of('# the line')}"] > 0.5 * sum(seen.values())
    stacks: Counter[tuple[str, ...]] = Counter()
    for key, weight in sampled(recorder).items():
        names = tuple(resolve(*key[i : i + 2])[2].rpartition(".")[2] for i in range(3, len(key), 2))
        stacks[names] += weight
    assert stacks.most_common(1)[0][0][:2] == ("innermost", "caller")


def test_time_is_kept_apart_by_what_the_ledger_is_charging():
    slots = SLOT_OF["forward"], SLOT_OF["backward"]
    with sampling() as (recorder, _):
        for slot, seconds in zip(slots, (0.1, 0.3), strict=True):
            recorder.current = slot
            in_python(seconds)
    by_slot: Counter[int] = Counter()
    for key, weight_ns in sampled(recorder).items():
        by_slot[key[0]] += weight_ns
    assert by_slot[slots[0]] / 1e9 == pytest.approx(0.1, abs=0.03)
    assert by_slot[slots[1]] / 1e9 == pytest.approx(0.3, abs=0.03)


def test_the_sampler_knows_what_it_costs():
    with sampling() as (_, sampler):
        in_python(0.5)
    assert 50 < sampler.count < 250
    assert 0 < sampler.cost_ns < sampler.count * 1_000_000


def test_nothing_is_sampled_while_measuring_is_off():
    with sampling() as (recorder, sampler):
        recorder.thread = 0
        before = sampled(recorder), sampler.count
        in_python(0.1)
    assert (sampled(recorder), sampler.count) == before


def test_a_failure_of_the_sampler_is_noted_and_the_script_goes_on():
    with sampling() as (recorder, _):
        recorder.log.sampled = None
        in_python(0.1)
    # A second one, where the next signal came while the first failure was being written down.
    assert 1 <= len(recorder.notes) <= 2
    assert all(note.startswith("measuring failed in Sampler._add: ") for note in recorder.notes)


# -- where it cannot be had


def test_elsewhere_than_on_linux_the_report_says_so(monkeypatch):
    sampler = Sampler(Recorder())
    monkeypatch.setattr(sys, "platform", "darwin")
    sampler.start()
    assert sampler.missing == "source lines are not sampled on darwin"
    sampler.vary()
    sampler.stop()


def test_a_loop_outside_the_main_thread_is_not_sampled_and_the_report_says_so():
    sampler = Sampler(Recorder())
    thread = threading.Thread(target=sampler.start)
    thread.start()
    thread.join()
    assert sampler.missing == "source lines are not sampled: the training loop is not in the main thread"


def test_where_the_kernel_gives_no_timer_the_report_says_so(tmp_path):
    write(
        tmp_path / "job.py",
        """
import resource, signal
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._sampler import Sampler
resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))
sampler = Sampler(Recorder())
sampler.start()
print(sampler.missing, signal.getsignal(signal.SIGURG) == signal.SIG_DFL)
sampler.stop()
""",
    )
    ended = run(sys.executable, "job.py", cwd=tmp_path)
    assert ended.stdout == "source lines are not sampled: timer_create failed (11) True\n"


# -- in forked children


@pytest.mark.extended
def test_a_forked_child_that_trains_is_sampled_too(tmp_path):
    write(
        tmp_path / "job.py",
        """
import os, sys, time, diagnose

def busy():
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass

def train(steps):
    for _ in range(steps):
        busy()
        diagnose.step()

diagnose.attach("run")
train(30)
child = os.fork()
train(50)
if child == 0:
    time.sleep(0.8)  # half a second later the records are written
    os._exit(0)
os.waitpid(child, 0)
print(diagnose.detach().where[0].function)
""",
    )
    ended = run(sys.executable, "job.py", cwd=tmp_path)
    assert ended.stderr == ""
    assert ended.stdout == "busy\n"
    logs = [read_rank(path) for path in rank_files(tmp_path / "run")]
    assert [len(log.steps) for log in logs] == [79, 49], "a process's first mark begins its first step"
    for log, least in zip(logs, (0.9, 0.2), strict=True):  # the child's end cost its last half second
        assert log.meta["notes"] == []
        seen = sum(weight for _, _, stack, weight in log.samples if stack[1][2] == "busy") / 1e9
        assert least < seen / ((log.steps[-1, 0] - log.steps[0, 0]) / 1e9) < 1.1
