"""The report in full: text, markdown, and the sections that they are made of."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from diagnose.core.host import HostStats
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.report import Terminal, to_html, to_json, to_markdown, to_text
from diagnose.report._end_findings import finding_lines
from diagnose.report._text import block_lines
from diagnose.report._wording import coverage, nothing_measured, what_to_do_without_steps
from diagnose.report.base import Column, Row, Table, sections
from tests.profiles import (
    FAULTY,
    FOUR_RANKS,
    HEALTHY,
    HOSTILE_PROFILE,
    MS,
    NOTHING,
    PROFILE,
    RUN,
    SERIAL,
    WORKERS,
    assert_lines,
    line,
)


def test_full_text_report_is_complete_and_fits() -> None:
    profile = replace(
        PROFILE,
        input=InputStats(fetch_ns=0.4 * MS, collate_ns=0.1 * MS),
        notes=("collectives: torch 2.6 has no hook; not measured",),
    )
    assert_lines(
        to_text(profile, Terminal(width=80)),
        """
run 20261120-141502-train
  samples/s          776      95 % interval 770-781
  step time, median  40.1 ms  mean 41.0 ms, p95 58.3 ms, p99 71.0 ms
  steps/s            24.3
  steps              412      the first 10 left out as warm-up
  measuring cost     38 us    per step, 0.1 % of it; 0.31 s at start

Where the step goes
  Mean time per measured step. The phases add up to the step.
  phase       per step   share
  data wait   20.50 ms    50 %  ████████████████████
  copy         0.02 ms  <0.1 %
  forward      8.20 ms    20 %  ████████
  backward    10.25 ms    25 %  ██████████
  optimizer    1.23 ms   3.0 %  █▎
  evaluation   0.00 ms     0 %
  checkpoint   0.08 ms   0.2 %  ▏
  compile      0.00 ms     0 %
  gc           0.01 ms  <0.1 %
  other        0.71 ms   1.7 %  ▊
  step        41.00 ms   100 %
  Not measured in this run: communication.

Source lines
  Sampled on the training thread. Share is of the step, with its 95 % interval.
  per step       share  phase      line          function
  13.94 ms     34 % ±3  data wait  train.py:41   JpegFolder.__getitem__
      image = decode(self.jpegs[index])
  10.25 ms     25 % ±2  backward   train.py:118  main
      loss.backward()
   8.20 ms     20 % ±2  forward    train.py:117  main
      loss = cross_entropy(model(images), labels)
   0.61 ms  1.5 % ±0.2  other      train.py:121  main
      losses.append(loss.item())

Loading a batch
  fetch    400 us  per batch, on the training thread
  collate  100 us  per batch, on the training thread

Events
  gc          12
  checkpoint  2

Notes
  collectives: torch 2.6 has no hook; not measured

This run
  command  train.py --lr 1e-3
  ended    ok
  started  2026-11-20 14:15:02 +01:00
  took     48.2 s
  torch    2.13.0
  device   cpu
""",
    )


def test_ascii_text_report_writes_its_own_signs_in_ascii_too() -> None:
    text = to_text(PROFILE, Terminal(unicode=False))
    assert text.isascii()
    assert "34 % +-3" in text and "\\x" not in text


def test_a_phase_that_was_not_measured_is_named_and_not_shown_as_zero() -> None:
    text = to_text(PROFILE, Terminal())
    assert "  Not measured in this run: communication.\n" in text
    assert "\n  communication" not in text
    assert "\n  evaluation   0.00 ms     0 %\n" in text


def test_ranks_are_compared_only_where_there_are_several_the_latest_first() -> None:
    assert "Ranks" not in to_text(replace(PROFILE, ranks=FOUR_RANKS[:1]), Terminal())
    text = to_text(replace(PROFILE, ranks=FOUR_RANKS), Terminal())
    assert_lines(
        text[text.index("  rank  host") : text.index("\nEvents")],
        """
  rank  host      late      step   forward  communication
     3  node1  1.50 ms  11.00 ms  10.00 ms        1.00 ms
     2  node1  1.00 ms  12.00 ms  10.00 ms        2.00 ms
     1  node0  0.50 ms  13.00 ms  10.00 ms        3.00 ms
     0  node0  0.00 ms  14.00 ms  10.00 ms        4.00 ms
""",
    )


def test_worker_section_says_what_the_workers_did() -> None:
    text = to_text(replace(PROFILE, input=InputStats(workers=WORKERS)), Terminal())
    assert_lines(
        text[text.index("Loading a batch") : text.index("\nEvents")],
        """
Loading a batch
  workers        4        412 batches made
  fetch          150 ms   per batch, in a worker
  collate        3.00 ms  per batch, in a worker
  send           1.20 ms  CPU per batch: pickle, queue
  on a CPU       93 %     of fetch and collate; the rest waits for disk, network or a core
  idle           2.0 %    of the workers' life
  batches ready  0.1      on average, when the loop asked
""",
    )


def test_workers_that_each_epoch_starts_anew_are_counted_once() -> None:
    workers = replace(WORKERS, num_workers=12, at_once=4)
    text = to_text(replace(PROFILE, input=InputStats(workers=workers)), Terminal())
    assert "  workers        4        started 3 times; 412 batches made\n" in text


def test_a_training_thread_that_loaded_no_measured_batch_has_no_times_of_one() -> None:
    text = to_text(replace(PROFILE, input=InputStats(fetch_ns=0.0, collate_ns=0.0)), Terminal())
    assert "Loading a batch" not in text


def test_time_of_workers_in_no_line_of_the_script_is_said_to_be_torchs() -> None:
    in_worker = replace(line(Phase.DATA_WAIT, 9, "decode", 0.45), in_worker=True)
    text = to_text(replace(PROFILE, where=(in_worker,)), Terminal(width=120))
    assert "were busy. Another 55 % passed in torch and other packages" in " ".join(text.split())
    text = to_text(replace(PROFILE, where=(replace(in_worker, share=0.99),)), Terminal(width=120))
    assert "Another" not in text


def test_machine_section_says_what_is_out_of_the_ordinary_and_nothing_else() -> None:
    idle = HostStats(
        cpus=8, full_cores=0.3, iowait_cpus=0.01, read_bytes_per_s=4096.0, written_bytes_per_s=0.0
    )
    assert "Machine" not in to_text(replace(PROFILE, host=idle), Terminal())
    busy = replace(
        idle, full_cores=1.04, iowait_cpus=0.62, read_bytes_per_s=3.0 * 2**20, written_bytes_per_s=2.0**31
    )
    text = to_text(replace(PROFILE, host=busy), Terminal())
    assert_lines(
        text[text.index("Machine") : text.index("\nEvents")],
        """
Machine
  full cores          1.0        of 8, busy all the time
  CPUs kept idle      0.6        on average, while a process waited for a disk
  read from storage   3.0 MiB/s  by this process
  written to storage  2.0 GiB/s  by this process
""",
    )
    assert to_json(replace(PROFILE, host=busy))["host"]["iowait_cpus"] == 0.62


def test_sections_come_in_one_order_and_no_two_share_a_place() -> None:
    orders = [section.order for section in sections()]
    assert orders == sorted(set(orders))
    assert len(orders) >= 8


def test_text_report_opens_with_what_was_found_the_proof_and_what_to_do() -> None:
    text = to_text(FAULTY, Terminal())
    assert_lines(
        text[text.index("What slows it down") : text.index("\nWhere the step goes")],
        """
What slows it down
  The training thread loads its own batches: 50 % of each step
    serial-loading  train.py:31
    lost  20.0 ms per step, 49 % of it: data wait
    gain  2.0x (1.5 to 2.0) faster without it
    - num_workers=0, and 20.5 ms of each step pass in next(loader).
    - 4 CPUs are idle.
    To do: Give the DataLoader two workers.
      DataLoader(..., num_workers=2, persistent_workers=True)
    The gain assumes: workers prepare a batch while the model computes, on CPUs
    that are free.

  The optimizer updates 412 tensors one by one
    slow-updates  ranks 0, 3
    lost  1.00 ms per step, 2.4 % of it: optimizer
    gain  1.02x (1.02 to 1.03) faster without it
    - 412 tensors of 1,000 elements on average.
    To do: Let one call update all tensors: pass foreach=True, or fused=True on
    a GPU, to the SGD in line 4.
    The gain assumes: one call for all tensors costs what one for a tensor does.
""",
    )


def test_the_gain_that_comes_first_is_that_of_the_fix() -> None:
    part = replace(PROFILE, findings=(replace(SERIAL, fix_won_ns=10 * MS),), num_rules=12)
    assert "gain  1.3x (1.3 to 2.0) faster with this fix; 2.0x without the fault" in to_text(
        part, Terminal(width=100)
    )
    findings, _ = finding_lines(part, 9, Terminal(width=80))
    assert "20.0 ms lost, gain 1.3x (1.3 to 2.0)" in findings[0]


def test_text_report_of_a_healthy_run_says_so_and_what_could_not_be_looked_for() -> None:
    text = to_text(HEALTHY, Terminal())
    assert (
        "What slows it down\n"
        "  No fault found that costs 2 % of the step or more; 12 rules asked, 1\n  abstained.\n"
    ) in text
    assert_lines(
        text[text.index("Faults that could") : text.index("\nThis run")],
        """
Faults that could not be looked for
  A reading that these rules need was not taken in this run.
  reading              rules
  host.runnable_share  starved-of-cpu
""",
    )


def test_a_report_before_the_rules_were_asked_claims_nothing() -> None:
    assert "What slows it down" not in to_text(PROFILE, Terminal())
    assert to_json(PROFILE)["num_rules"] is None


def test_steps_that_were_left_out_are_said_to_be() -> None:
    tuned = replace(PROFILE, steps=replace(PROFILE.steps, count=5000, warmup=10, left_out=4850))
    text = to_text(tuned, Terminal(width=200))
    assert "140 measured; 4,850 and the warm-up left out" in text
    assert coverage(tuned) == "report covers 140 of 5,000 steps"
    assert to_json(tuned)["steps"]["left_out"] == 4850
    beyond = replace(NOTHING, steps=replace(NOTHING.steps, count=100, warmup=0, left_out=100))
    assert "warm-up" not in nothing_measured(beyond) + "".join(what_to_do_without_steps(beyond))


def test_a_run_that_was_detached_is_no_alarm() -> None:
    detached = replace(PROFILE, run=replace(PROFILE.run, exit_code=None, duration_s=5.0))
    assert ' alarm">measured' not in to_html(detached)
    failed = replace(PROFILE, run=replace(PROFILE.run, exit_code=3))
    assert ' alarm">' in to_html(failed)


def test_markdown_report_shows_the_ledger_and_lets_no_foreign_markup_through() -> None:
    text = to_markdown(PROFILE)
    assert text.startswith("## diagnose: `train.py`\n\n- samples/s: **776** (95 % interval 770-781)\n")
    assert "\n| data wait | 20.50 ms | 50 % | ██████████ |\n" in text
    assert "| `train.py:41` | `JpegFolder.__getitem__` | `image = decode(self.jpegs[index])` |\n" in text
    hostile = to_markdown(
        replace(
            HOSTILE_PROFILE,
            run=replace(RUN, script="a`b|c"),
            notes=("- @someone #1 <b>", "**x** | [a](b)"),
        )
    )
    assert hostile.startswith("## diagnose: `` a`b|c ``\n")
    assert "\n\n\\- \\@someone \\#1 \\<b\\>\n\n\\*\\*x\\*\\* \\| \\[a\\](b)\n" in hostile
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)|(?<=\n\n)    .*\n", "", hostile)
    assert "<img" not in outside_code.replace("\\<img", "")
    assert "`a\\|b`" in to_markdown(replace(PROFILE, where=(line(Phase.COPY, 1, "a|b", 0.1),)))


def test_markdown_report_shows_findings_as_text_and_code_to_paste_as_code() -> None:
    text = to_markdown(FAULTY)
    assert (
        "\n#### The training thread loads its own batches: 50 % of each step\n\n"
        "`serial-loading`, `train.py:31`\n\n"
        "- lost: **20.0 ms** (per step, 49 % of it: data wait)\n"
        "- gain: **2.0x (1.5 to 2.0)** (faster without it)\n"
        "- num\\_workers=0, and 20.5 ms"
    ) in text
    assert "\n**To do:** Give the DataLoader two workers.\n\n    DataLoader(..., num_workers=2" in text


def test_code_in_a_sentence_is_code_and_a_single_backtick_is_itself() -> None:
    proof = replace(SERIAL, evidence=("`a_b` and `<i>` cost 3 ms.", "a ` alone"))
    faulty = replace(FAULTY, findings=(proof,))
    assert "- `a_b` and `<i>` cost 3 ms.\n- a \\` alone\n" in to_markdown(faulty)
    page = to_html(faulty)
    assert "<li><code>a_b</code> and <code>&lt;i&gt;</code> cost 3 ms.</li>\n<li>a ` alone</li>" in page


WORDY = Table(
    caption="",
    columns=(Column(title="fix", code=True), Column(title="steps", number=True), Column(title="outcome")),
    rows=(
        Row(cells=("loader-workers=2", "106", "cannot tell, undone (it takes 2.3x to be seen)")),
        Row(cells=("dataset-cache", "362", "kept")),
    ),
)


def test_words_in_the_last_column_are_wrapped_and_no_name_is_cut() -> None:
    assert block_lines(WORDY, Terminal(width=60)) == [
        "  fix               steps  outcome",
        "  loader-workers=2    106  cannot tell, undone (it takes",
        "                           2.3x to be seen)",
        "  dataset-cache       362  kept",
    ]


def test_words_without_room_beside_their_row_stand_below_it() -> None:
    assert block_lines(WORDY, Terminal(width=44)) == [
        "  fix               steps",
        "  loader-workers=2    106",
        "      cannot tell, undone (it takes 2.3x to",
        "      be seen)",
        "  dataset-cache       362",
        "      kept",
    ]


def test_a_table_refuses_a_row_of_another_width() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table(caption="", columns=(Column(title="a"), Column(title="b")), rows=(Row(cells=("1",)),))
