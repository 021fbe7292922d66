"""Ctrl-C while the tuner changes something."""

from __future__ import annotations

import os
import signal
import threading
import timeit

import pytest

from diagnose.launch.interrupts import interrupts_wait


def test_ctrl_c_comes_when_the_change_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_scripts_own_handler_is_called_once_and_stays():
    calls = []

    def handler(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_meanwhile_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupts_wait():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_touched():
    seen = []

    def look():
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_it_costs_less_than_the_calls_of_the_signal_module_that_it_stands_for():
    """It is entered in every step of a tuned run."""

    def waits() -> None:
        with interrupts_wait():
            pass

    def calls() -> None:
        for _ in range(2):
            signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))

    assert min(timeit.repeat(waits, number=1000)) < min(timeit.repeat(calls, number=1000))
