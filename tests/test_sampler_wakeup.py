"""The sampler, where signals also write to a pipe: that of an event loop, which awaits some."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import pytest

from diagnose.hooks._recorder import Recorder
from diagnose.hooks._sampler import WAKES, Sampler
from tests.test_sampler import in_python, sampling

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernel timers are Linux's"),
]

MORE_THAN_A_PIPE_HOLDS = 1000


def test_an_event_loop_that_is_held_up_by_training_gets_its_signal_all_the_same(capfd):
    got: list[str] = []

    async def train() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, got.append, "SIGUSR1")
        for _ in range(MORE_THAN_A_PIPE_HOLDS):
            os.kill(os.getpid(), signal.SIGURG)  # as the timer does in some seconds
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.01)

    with sampling() as (recorder, sampler):
        in_python(0.05)
        assert recorder.log.sampled
        asyncio.run(train())
        assert sampler.missing == WAKES
        taken = len(recorder.log.sampled)
        in_python(0.05)
        assert len(recorder.log.sampled) == taken
    assert got == ["SIGUSR1"]
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


def test_where_signals_write_to_a_pipe_from_the_beginning_no_sample_is_taken():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        sampler = Sampler(Recorder())
        sampler.start()
        assert sampler.missing == WAKES
        assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL
    finally:
        assert signal.set_wakeup_fd(before) == theirs.fileno(), "it is where it was"
        ours.close()
        theirs.close()
