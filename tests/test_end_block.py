"""The end block of a run: what the user sees, letter for letter."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import (
    Overhead,
    Profile,
    SourceLine,
    Status,
    StepStats,
    Throughput,
)
from diagnose.report import Terminal, end_block, to_text
from diagnose.report._terminal import display_width, wants_color
from tests.profiles import FAULTY, NOTHING, PROFILE, RUN, SERIAL, SPLIT, TUNED, assert_lines, line


def test_end_block_shows_figures_ledger_lines_cost_and_the_next_command() -> None:
    assert_lines(
        end_block(PROFILE),
        """
diagnose: 412 steps, median 40.1 ms, 776 samples/s (770-781)
  data wait       20.50 ms    50 %  ██████████████████████
  forward          8.20 ms    20 %  ████████▊
  backward        10.25 ms    25 %  ███████████
  optimizer        1.23 ms   3.0 %  █▍
  other            0.71 ms   1.7 %  ▊
  the rest         0.11 ms   0.3 %  copy, checkpoint, gc
  train.py:41 JpegFolder.__getitem__                        34 %  data wait
  train.py:118 main                                         25 %  backward
  train.py:117 main                                         20 %  forward
  measuring cost 38 us per step (0.1 %), 0.31 s at start
  next: diagnose report 20261120-141502-train --html report.html
""",
    )


def test_end_block_shows_what_was_found_before_the_ledger() -> None:
    assert_lines(
        end_block(FAULTY),
        """
diagnose: 412 steps, median 40.1 ms, 776 samples/s (770-781)
  serial-loading train.py:31                20.0 ms lost, gain 2.0x (1.5 to 2.0)
    The training thread loads its own batches: 50 % of each step
    fix: Give the DataLoader two workers.
         DataLoader(..., num_workers=2, persistent_workers=True)
  slow-updates                           1.00 ms lost, gain 1.02x (1.02 to 1.03)
    fix: Let one call update all tensors: pass foreach=True, or fused=True on …
  data wait       20.50 ms    50 %  ██████████████████████
  backward        10.25 ms    25 %  ███████████
  the rest        10.25 ms    25 %  copy, forward, optimizer, checkpoint, gc, …
  measuring cost 38 us per step (0.1 %), 0.31 s at start
  next: diagnose report 20261120-141502-train --html report.html
""",
    )


def test_end_block_of_a_tuned_run_says_how_fast_it_was_and_is_and_which_faults_are_dealt_with() -> None:
    assert_lines(
        end_block(TUNED),
        """
diagnose: 412 steps, median 40.1 ms -> 19.6 ms, 776 -> 1,610 samples/s
  tuned to 2.0x (1.9 to 2.1) of its speed with 1 fix, confirmed on against off
  + loader-workers=8   1.9x (1.8 to 2.0), predicted 1.6x
  slow-updates                           1.00 ms lost, gain 1.02x (1.02 to 1.03)
    The optimizer updates 412 tensors one by one
    fix: Let one call update all tensors: pass foreach=True, or fused=True on …
  dealt with: serial-loading (20.0 ms lost before)
  data wait       20.50 ms ->   0.00 ms
  backward        10.25 ms ->  11.00 ms  ██████████▌
  the rest        10.25 ms ->   9.00 ms  copy, forward, optimizer, checkpoint, …
  measuring cost 38 us per step (0.1 %), 0.31 s at start
  next: diagnose report 20261120-141502-train --html report.html
""",
    )


def test_end_block_of_a_tuned_run_counts_what_is_not_found_any_more_as_dealt_with() -> None:
    assert TUNED.tuning is not None
    other = replace(SPLIT, actions=("fused-optimizer",))
    for left, dealt_with in (((), True), (("slow-updates",), False), (None, False)):
        tuned = replace(TUNED, findings=(SERIAL, other), tuning=replace(TUNED.tuning, left=left))
        assert ("(20.0 ms lost before), slow-updates" in end_block(tuned)) is dealt_with
        assert ("gain 1.02x" in end_block(tuned)) is not dealt_with


def test_end_block_of_a_run_that_ended_before_the_last_trial_gives_the_figures_from_before() -> None:
    assert TUNED.tuning is not None
    cut = replace(
        TUNED.tuning, tuned=None, tuned_median_ns=None, tuned_samples_per_s=None, confirmation=None
    )
    first = end_block(replace(TUNED, tuning=cut)).splitlines()[0]
    assert first == "diagnose: 412 steps, before tuning median 40.1 ms, 776 samples/s (770-781)"
    undone = replace(TUNED.tuning, undone="a loss that is not finite")
    lines = end_block(replace(TUNED, tuning=undone)).splitlines()
    assert lines[0] == "diagnose: 412 steps, median 40.1 ms, 776 samples/s (770-781)"
    assert not any("dealt with" in line for line in lines)


def test_end_block_tells_the_mean_that_the_phases_sum_to_where_it_is_not_the_median() -> None:
    uneven = replace(PROFILE, steps=replace(PROFILE.steps, median_ns=30e6))
    first = end_block(uneven).splitlines()[0]
    assert first == "diagnose: 412 steps, mean 41.0 ms (median 30.0 ms), 776 samples/s (770-781)"


def test_end_block_with_one_finding_has_room_for_the_lines() -> None:
    lines = end_block(replace(FAULTY, findings=(SERIAL,))).splitlines()
    assert len(lines) == 12
    assert lines[-3].startswith("  train.py:41 JpegFolder.__getitem__ ")


def test_end_block_counts_the_findings_and_notes_it_has_no_room_for() -> None:
    many = replace(FAULTY, findings=(SERIAL, SPLIT, SPLIT, SPLIT), notes=("a", "b"))
    lines = end_block(many).splitlines()
    assert len(lines) == 12
    assert sum("ms lost, gain" in line for line in lines) == 3
    assert lines[-2] == "  measuring cost 38 us per step (0.1 %); 1 more finding, 2 notes in the report"


def test_end_block_cuts_no_name_and_no_figure_in_its_middle() -> None:
    dear = replace(PROFILE, overhead=Overhead(us_per_step=1086, startup_s=0.3), notes=("a",))
    lines = end_block(replace(dear, findings=(SERIAL, *[SPLIT] * 5))).splitlines()
    assert lines[-3:-1] == [
        "  the rest        10.25 ms    25 %  copy, forward, optimizer, checkpoint, gc, …",
        "  measuring cost 1,086 us per step (2.6 %); 3 more findings, 1 note",
    ]


def test_end_block_of_a_narrow_terminal_keeps_the_rule_its_place_and_its_gain() -> None:
    lines = end_block(replace(FAULTY, findings=(SERIAL,)), Terminal(width=60)).splitlines()
    assert lines[1:5] == [
        "  serial-loading train.py:31         20.0 ms lost, gain 2.0x",
        "    The training thread loads its own batches: 50 % of each",
        "    step",
        "    fix: Give the DataLoader two workers.",
    ]


def test_end_block_is_pure_ascii_where_the_terminal_is() -> None:
    accented = replace(PROFILE, where=(line(Phase.FORWARD, 7, "Modèle.forward", 0.2),))
    text = end_block(accented, Terminal(unicode=False))
    assert text.isascii()
    assert "  data wait       20.50 ms    50 %  ######################\n" in text
    assert "  train.py:7 Mod\\xe8le.forward" in text


def test_end_block_without_colour_has_no_escape_and_with_colour_the_same_words() -> None:
    plain, coloured = end_block(FAULTY), end_block(FAULTY, Terminal(color=True))
    assert "\033" not in plain
    for code in ("1", "2", "36", "1;31", "0"):
        coloured = coloured.replace(f"\033[{code}m", "")
    assert coloured == plain


def test_end_block_of_a_failed_script_says_how_it_failed_and_what_the_report_covers() -> None:
    failed = replace(
        PROFILE, status=Status.SCRIPT_FAILED, run=replace(RUN, exit_code=1, error="ValueError")
    )
    whole = replace(failed, steps=replace(PROFILE.steps, warmup=0))
    assert end_block(whole).splitlines()[:2] == [
        "diagnose: script failed with ValueError after 412 steps",
        "  report covers steps 1-412, median 40.1 ms, 776 samples/s (770-781)",
    ]
    assert end_block(whole, Terminal(width=100)).splitlines()[:2] == [
        "diagnose: script failed with ValueError after 412 steps; report covers steps 1-412",
        "  412 steps, median 40.1 ms, 776 samples/s (770-781)",
    ]


def test_end_block_of_a_killed_script_names_the_signal_and_the_likely_reason() -> None:
    killed = replace(PROFILE, status=Status.SCRIPT_FAILED, run=replace(RUN, exit_code=None, signal=9))
    assert_lines(
        end_block(killed),
        """
diagnose: script ended by SIGKILL after 412 steps; report covers steps 11-412
  most likely the out-of-memory killer (see dmesg) or the job scheduler
  412 steps, median 40.1 ms, 776 samples/s (770-781)
  data wait       20.50 ms    50 %  ██████████████████████
  forward          8.20 ms    20 %  ████████▊
  backward        10.25 ms    25 %  ███████████
  the rest         2.05 ms   5.0 %  copy, optimizer, checkpoint, gc, other
  train.py:41 JpegFolder.__getitem__                        34 %  data wait
  train.py:118 main                                         25 %  backward
  train.py:117 main                                         20 %  forward
  measuring cost 38 us per step (0.1 %), 0.31 s at start
  next: diagnose report 20261120-141502-train --html report.html
""",
    )


def test_end_block_of_too_few_steps_gives_figures_and_says_that_there_is_no_verdict() -> None:
    few = replace(PROFILE, status=Status.TOO_FEW_STEPS, steps=replace(PROFILE.steps, count=12, warmup=4))
    assert end_block(few).splitlines()[:2] == [
        "diagnose: only 8 steps after 4 of warm-up: too few for a verdict, figures only",
        "  12 steps, median 40.1 ms, 776 samples/s (770-781)",
    ]


def test_end_block_without_steps_says_what_was_seen_and_how_to_mark_a_step() -> None:
    assert_lines(
        end_block(NOTHING),
        """
diagnose: no optimizer step was seen in 12.3 s; torch was imported
  If torch.optim does not drive the steps, mark where each one ends:
      import diagnose; diagnose.step()
  measuring cost 0.31 s at start
  next: diagnose report 20261120-141502-train --html report.html
""",
    )


def test_end_block_without_torch_asks_whether_this_is_the_script_that_trains() -> None:
    bare = replace(NOTHING, run=replace(RUN, torch=None, duration_s=0.4), overhead=Overhead())
    assert_lines(
        end_block(bare),
        """
diagnose: no optimizer step was seen in 400 ms; torch was not imported
  Is this the script that trains, run by the Python that has torch?
  next: diagnose report 20261120-141502-train --html report.html
""",
    )
    assert end_block(bare, Terminal(width=44)).splitlines()[1:3] == [
        "  Is this the script that trains, run by the",
        "  Python that has torch?",
    ], "advice is never cut"


def test_end_block_of_a_script_that_failed_before_its_first_step_has_no_figures() -> None:
    failed = replace(
        NOTHING, status=Status.SCRIPT_FAILED, run=replace(RUN, exit_code=1, error="ImportError")
    )
    assert_lines(
        end_block(failed),
        """
diagnose: script failed with ImportError before any step was recorded
  measuring cost 0.31 s at start
  next: diagnose report 20261120-141502-train --html report.html
""",
    )


def test_end_block_shows_the_first_note_and_counts_the_others() -> None:
    noted = replace(PROFILE, notes=("collectives: torch 2.6 has no hook; not measured", "another"))
    lines = end_block(noted).splitlines()
    assert len(lines) == 12
    assert lines[-3] == "  note: collectives: torch 2.6 has no hook; not measured (+1 more in the report)"


def test_a_workers_line_counts_only_as_far_as_the_loop_waits_for_data() -> None:
    busy = SourceLine(
        phase=Phase.DATA_WAIT, file="/data/set.py", line=9, function="decode", share=0.9, in_worker=True
    )
    waiting = end_block(replace(PROFILE, where=(*PROFILE.where, busy)))
    assert "  /data/set.py:9 decode                                     90 %  of the workers\n" in waiting
    keeping_up = {**PROFILE.phase_time_ns, Phase.DATA_WAIT: 0.0}
    assert "set.py" not in end_block(
        replace(PROFILE, where=(*PROFILE.where, busy), phase_time_ns=keeping_up)
    )


def test_terminal_escapes_in_foreign_names_are_printed_as_text() -> None:
    hostile = SourceLine(phase=Phase.FORWARD, file="/x/\033[31mred.py", line=1, function="a\nb", share=0.5)
    profile = replace(PROFILE, where=(hostile,), notes=("\033]0;title\a",), run=replace(RUN, id="a\rb"))
    for text in (end_block(profile), to_text(profile, Terminal())):
        assert "\033" not in text and "\a" not in text and "\r" not in text
        assert "/x/\\x1b[31mred.py:1" in text


names = st.text(min_size=1, max_size=120)
shares = st.floats(0, 1)


@settings(database=None, deadline=None)
@given(
    times=st.dictionaries(st.sampled_from(list(Phase)), st.floats(0, 1e12), max_size=11),
    where=st.lists(
        st.builds(
            SourceLine,
            phase=st.sampled_from(list(Phase)),
            file=names,
            line=st.integers(1, 10**6),
            function=names,
            share=shares,
            in_worker=st.booleans(),
        ),
        max_size=5,
    ),
    count=st.integers(0, 10**9),
    warmup=st.integers(0, 20),
    error=st.none() | names,
    number=st.none() | st.integers(1, 64),
    notes=st.lists(names, max_size=3),
    findings=st.lists(
        st.builds(
            Finding,
            rule=names,
            summary=names,
            lost_ns=st.just({Phase.FORWARD: 2e9}),
            low_ns=st.just(0.0),
            high_ns=st.just(9e9),
            assumption=names,
            evidence=st.just(("proof",)),
            fix=names,
            code=names,
            file=st.just("") | names,
            line=st.integers(0, 10**6),
        ),
        max_size=5,
    ),
    num_rules=st.none() | st.integers(0, 200),
    status=st.sampled_from(list(Status)),
    width=st.integers(44, 120),
    unicode=st.booleans(),
    identity=names,
)
def test_end_block_never_exceeds_twelve_lines_nor_the_width_of_the_terminal(
    times: dict[Phase, float],
    where: list[SourceLine],
    count: int,
    warmup: int,
    error: str | None,
    number: int | None,
    notes: list[str],
    findings: list[Finding],
    num_rules: int | None,
    status: Status,
    width: int,
    unicode: bool,
    identity: str,
) -> None:
    profile = Profile(
        run=replace(RUN, id=identity, error=error, signal=number),
        status=status,
        steps=StepStats(count=count, warmup=min(warmup, count), median_ns=1e9),
        throughput=Throughput(
            samples_per_s=1e7, samples_per_s_ci95=(9e6, 1.1e7), tokens_per_s=1e9, steps_per_s=1.0
        ),
        phase_time_ns=times,
        where=tuple(where),
        notes=tuple(notes),
        findings=tuple(findings),
        num_rules=num_rules,
        overhead=Overhead(us_per_step=12.0, startup_s=0.1),
    )
    lines = end_block(profile, Terminal(width=width, unicode=unicode)).split("\n")
    assert lines.pop() == ""
    assert len(lines) <= 12
    assert max(map(display_width, lines)) <= width
    assert unicode or "".join(lines).isascii()


@pytest.mark.parametrize(
    ("environ", "is_terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
    ],
)
def test_colour_is_used_on_terminals_unless_the_environment_says_otherwise(
    environ: dict[str, str], is_terminal: bool, colour: bool
) -> None:
    assert wants_color(is_terminal, environ) is colour


def test_a_pipe_is_80_columns_without_colour_and_its_encoding_decides_on_ascii(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    utf8 = io.TextIOWrapper(io.BytesIO(), encoding="UTF-8")
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert Terminal.of(utf8) == Terminal(width=80, color=False, unicode=True)
    assert Terminal.of(latin) == Terminal(width=80, color=False, unicode=False)
