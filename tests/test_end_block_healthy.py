"""The end block of a run in which the rules found nothing."""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Abstention
from diagnose.report import Terminal, end_block
from tests.profiles import HEALTHY, PROFILE


def test_end_block_of_a_healthy_run_says_that_nothing_was_found_by_how_many_rules() -> None:
    healthy = "  no fault found that costs 2 % of the step or more; 12 rules asked, 1 abstained"
    assert end_block(HEALTHY).splitlines()[1] == healthy
    assert end_block(HEALTHY, Terminal(width=60)).splitlines()[1] == (
        "  no fault of 2 % or more found; 12 rules asked, 1 abstained"
    )
    assert "no fault" not in end_block(PROFILE), "nobody asked"


def test_end_block_of_a_run_on_a_device_says_which_rules_a_deep_window_would_let_answer() -> None:
    silent = (
        Abstention(rule="launch-bound", missing="device.launch_bound_ns"),
        Abstention(rule="memory-layout", missing="device.layout_share"),
        Abstention(rule="starved-of-cpu", missing="host.runnable_share"),
    )
    unsure = replace(HEALTHY, abstained=silent, run=replace(HEALTHY.run, device="cuda"))
    assert end_block(unsure).splitlines()[2] == "    2 more rules could answer with --deep-window auto"
    assert max(map(len, end_block(unsure, Terminal(width=40)).splitlines()[1:3])) <= 40
    assert "deep-window" not in end_block(replace(unsure, run=HEALTHY.run)), "its device is a CPU"
