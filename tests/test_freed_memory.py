"""How a script is told to keep what it frees, by each version of the C library."""

from __future__ import annotations

import os

import pytest

from diagnose.core.freed_memory import as_statement, as_variables
from diagnose.gate.in_turns import KEEPS_FREED
from diagnose.rules.page_faults import PageFaults


@pytest.mark.parametrize(
    ("library", "most"),
    [
        ("glibc 2.9", 25),
        ("glibc 2.34", 25),
        ("glibc 2.35", 30),
        ("glibc 2.41.9000", 30),
        ("glibc 3.0", 30),
        ("", 30),
        (None, 30),
    ],
)
def test_no_threshold_is_set_that_an_older_glibc_would_not_take(
    monkeypatch: pytest.MonkeyPatch, library: str | None, most: int
) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: library)
    assert as_variables() == {
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "MALLOC_MMAP_THRESHOLD_": str(1 << most),
    }
    finding = PageFaults().check(PageFaults.fires_on[0])
    assert finding is not None
    assert f"MALLOC_MMAP_THRESHOLD_={1 << most} in the environment" in finding.fix
    assert finding.code == as_statement()
    assert finding.code.endswith(f"mallopt(-1, 1 << 30); ctypes.CDLL(None).mallopt(-3, 1 << {most})")


@pytest.mark.parametrize("error", [ValueError, OSError, AttributeError])
def test_another_c_library_is_told_what_a_new_glibc_is(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuses(name: str) -> str:
        raise error

    monkeypatch.setattr(os, "confstr", refuses)
    assert as_variables()["MALLOC_MMAP_THRESHOLD_"] == "1073741824"


def test_the_gate_sets_what_this_machines_library_takes() -> None:
    assert as_variables() == KEEPS_FREED
