"""The sampler disturbs nothing: waits, reads, children, other threads, handlers and signals."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from diagnose.hooks._recorder import Recorder
from diagnose.hooks._sampler import Sampler
from tests.test_sampler import by_function, in_python, sampled, sampling

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernel timers are Linux's"),
]


def test_waiting_takes_as_long_as_it_is_told_to():
    reading, writing = os.pipe()
    ours, theirs = socket.socketpair()
    ours.settimeout(0.2)
    lock = threading.Lock()
    lock.acquire()

    def until_timeout() -> None:
        with suppress(TimeoutError):
            ours.recv(1)

    waits: dict[str, Callable[[], object]] = {
        "sleep": lambda: time.sleep(0.2),
        "select": lambda: select.select([reading], [], [], 0.2),
        "poll": lambda: select.poll().poll(200),
        "event": lambda: threading.Event().wait(0.2),
        "lock": lambda: lock.acquire(timeout=0.2),
        "socket": until_timeout,
        "signal": lambda: signal.sigtimedwait([signal.SIGUSR1], 0.2),
        "child": lambda: subprocess.run(["sleep", "0.2"], check=True),
    }
    with sampling():
        for name, wait in waits.items():
            begun = time.monotonic()
            wait()
            assert 0.199 <= time.monotonic() - begun < 1.0, name
    for end in (reading, writing):
        os.close(end)
    ours.close()
    theirs.close()


def test_a_read_that_blocks_gets_all_that_was_written():
    reading, writing = os.pipe()

    def write_slowly() -> None:
        for number in range(20):
            time.sleep(0.01)
            os.write(writing, bytes([number]))
        os.close(writing)

    with sampling():
        threading.Thread(target=write_slowly).start()
        with open(reading, "rb") as pipe:
            assert pipe.read() == bytes(range(20))


def test_a_child_process_is_not_sampled():
    code = """
import signal, time
end = time.time() + 0.3
while time.time() < end:
    pass
print(signal.getsignal(signal.SIGURG) == signal.SIG_DFL)
"""
    with sampling():
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "True\n"


def test_other_threads_are_never_interrupted():
    seen: list[int] = []

    def work() -> None:
        in_python(0.3)
        seen.append(threading.get_ident())

    with sampling() as (recorder, _):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen
    assert "in_python" not in by_function(recorder), "this thread waited in join"


def test_a_handler_of_the_scripts_own_stays_and_the_report_says_that_nothing_is_sampled():
    got: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: got.append(number))
    try:
        sampler = Sampler(Recorder())
        sampler.start()
        assert sampler.missing == "source lines are not sampled: the script uses SIGURG itself"
        os.kill(os.getpid(), signal.SIGURG)
        in_python(0.05)
        sampler.stop()
        assert got == [signal.SIGURG]
    finally:
        signal.signal(signal.SIGURG, before)


def test_a_handler_that_the_script_installs_later_stays():
    got: list[int] = []

    def theirs(number: int, frame: object) -> None:
        got.append(number)

    with sampling():
        before = signal.signal(signal.SIGURG, theirs)
        in_python(0.05)
    assert signal.getsignal(signal.SIGURG) is theirs
    number = len(got)
    in_python(0.05)
    assert len(got) == number, "the timer is gone"
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    assert before is not signal.SIG_DFL


def test_a_signal_of_somebody_else_does_no_harm():
    with sampling() as (recorder, _):
        for _ in range(50):
            os.kill(os.getpid(), signal.SIGURG)
        in_python(0.1)
    assert all(weight_ns > 0 for weight_ns in sampled(recorder).values())
    assert sum(sampled(recorder).values()) / 1e9 < 0.3


def test_leaving_puts_back_the_handler_and_the_timer():
    timers = Path("/proc/self/timers")
    before = signal.getsignal(signal.SIGURG), timers.read_text() if timers.exists() else ""
    with sampling() as (_, sampler):
        assert signal.getsignal(signal.SIGURG) != before[0]
    assert (signal.getsignal(signal.SIGURG), timers.read_text() if timers.exists() else "") == before
    sampler.stop()  # a second time does nothing
    sampler.vary()
