"""The benchmark of verdicts counts as it says, and the verdicts on scripts with a known fault are right."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.optim  # noqa: F401 (before the first test, after which torch must be as it was)

from tests.running import REPOSITORY, environment

pytestmark = pytest.mark.alone

BENCHMARKS = REPOSITORY / "benchmarks"
TIMEOUT_S = 280
FLOOR = "0.6"
"""Least part of the quick faults to be named first; a machine with neighbours misses one now and then."""


@pytest.mark.slow
def test_the_first_cause_named_is_the_one_that_is_there():
    ended = subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "accuracy.py")),
            *("--quick", "--only", "audio_tags", "--repeat", "0", "--floor", FLOOR),
            *("--classes", "serial-loading,slow-collate,logging-io,healthy"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture
def accuracy(monkeypatch) -> SimpleNamespace:
    """The benchmark's modules; its own folder is first on the path, as when it runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from accuracy import kept, score, scripts, server, sizing, tables, truth

    return SimpleNamespace(
        kept=kept, score=score, scripts=scripts, server=server, sizing=sizing, tables=tables, truth=truth
    )


@pytest.fixture
def answer(accuracy):
    """Makes the answer of a script with faults to what was found in it: `("slow-collate", 0.2)`."""
    script = accuracy.scripts.scripts("tuning")[0]

    def make(*found, faults=("slow-collate",), kind="single", true=0.2, noise=0.01):
        job = accuracy.server.Job(
            step_ms=10.0,
            findings=tuple(accuracy.server.Named(rule=rule, lost_share=share) for rule, share in found),
            abstained=(),
            status="ok",
        )
        asked = tuple(accuracy.scripts.Fault(label=label, option="--x", probe=1) for label in faults)
        cell = accuracy.truth.Cell(script=script, kind=kind, faults=asked, severity=20)
        return accuracy.truth.Answer(cell=cell, job=job, true_share=true, noise_share=noise)

    return make


def test_the_first_name_counts_and_the_third_counts_less(accuracy, answer):
    scored = accuracy.score.score(
        [answer(("slow-collate", 0.2)), answer(("gc-pauses", 0.3), ("slow-collate", 0.2)), answer()]
    )
    assert (scored.asked, scored.top_1, scored.top_3) == (3, pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert scored.confusion == {
        ("slow-collate", "slow-collate"): 1,
        ("slow-collate", "gc-pauses"): 1,
        ("slow-collate", "nothing"): 1,
    }


def test_the_size_error_is_a_part_of_the_true_slowdown(accuracy, answer):
    assert accuracy.score.size_error(answer(("slow-collate", 0.25))) == pytest.approx(0.25)
    assert accuracy.score.size_error(answer(("gc-pauses", 0.25))) is None


def test_of_several_runs_the_first_is_judged_and_the_median_is_their_size(accuracy, answer):
    first, *more = (answer(("slow-collate", size)) for size in (0.5, 0.26, 0.2))
    silent = answer()
    several = dataclasses.replace(first, more=(*(each.job for each in more), silent.job))
    assert accuracy.score.size_error(several) == pytest.approx(0.3)
    scored = accuracy.score.score([several])
    assert (scored.asked, scored.top_1, scored.again) == (1, 1.0, (2, 3))
    assert accuracy.score.size_error(dataclasses.replace(several, job=silent.job)) is None


def test_a_slowdown_within_the_noise_is_unresolved_and_not_judged(accuracy, answer):
    scored = accuracy.score.score([answer(("gc-pauses", 0.2), true=0.1, noise=0.06)])
    assert (scored.unresolved, scored.asked, scored.top_1) == (1, 0, None)


def test_a_finding_on_a_healthy_job_is_a_false_alarm_if_it_claims_to_matter(accuracy, answer):
    healthy = {"faults": (), "kind": "control", "true": None}
    scored = accuracy.score.score(
        [answer(**healthy), answer(("gc-pauses", 0.04), **healthy), answer(("gc-pauses", 0.06), **healthy)]
    )
    assert (scored.false_alarms, scored.controls) == (1, 3)
    assert scored.confusion["healthy", "gc-pauses"] == 1


def test_a_neighbour_is_judged_only_where_one_was_put(accuracy, answer):
    beside = answer(("noisy-neighbour", 0.5), ("slow-collate", 0.2))
    injected = answer(("noisy-neighbour", 0.5), faults=("noisy-neighbour",))
    scored = accuracy.score.score([beside, injected])
    assert (scored.top_1, scored.disturbed) == (1.0, 1)


def test_a_decoy_is_seen_through_when_only_what_hides_it_is_named(accuracy, answer):
    decoy = {"faults": ("slow-collate", "logging-io"), "kind": "decoy", "true": 0.0}
    assert accuracy.score.is_right(answer(("logging-io", 0.3), ("slow-collate", 0.03), **decoy))
    assert not accuracy.score.is_right(answer(("slow-collate", 0.3), ("logging-io", 0.2), **decoy))
    assert not accuracy.score.is_right(answer(**decoy))


def test_a_pair_wants_both_among_three(accuracy, answer):
    pair = {"faults": ("slow-collate", "logging-io"), "kind": "pair"}
    both = answer(("logging-io", 0.3), ("slow-collate", 0.2), **pair)
    one = answer(("logging-io", 0.3), **pair)
    scored = accuracy.score.score([both, one])
    assert (scored.pairs_first, scored.pairs_both) == (2, 1)


def test_an_answer_is_kept_for_the_next_sitting_even_after_a_torn_one(accuracy, answer, tmp_path):
    first, second = answer(("slow-collate", 0.2)), answer(("gc-pauses", 0.3), faults=("gc-pauses",))
    first = dataclasses.replace(first, more=(second.job, first.job))
    path = tmp_path / "answers.jsonl"
    accuracy.kept.Kept(path).keep(first)
    said = accuracy.truth.Said(verdicts=("INPUT_BOUND: slow", "other"), grave=("other",))
    accuracy.kept.Kept(path).keep_said("traceml", first.cell, said)
    path.write_text(path.read_text() + '\n{"of": "sing')
    accuracy.kept.Kept(path).keep(second)
    kept = accuracy.kept.Kept(path)
    commit = accuracy.kept.commit()
    assert kept.answer(first.cell) == dataclasses.replace(first, commit=commit)
    assert kept.answer(second.cell) == dataclasses.replace(second, commit=commit)
    page = accuracy.tables.page([kept.answer(first.cell), kept.answer(second.cell)])
    assert f"asked: 2 at {commit}." in page or not commit
    assert (kept.said("traceml", first.cell), kept.said("gpuprof", first.cell)) == (said, None)
    assert kept.answer(answer(kind="decoy").cell) is None


def test_each_fault_is_an_option_of_its_script_and_the_sets_share_no_script(accuracy):
    scripts = accuracy.scripts.scripts()
    for script in scripts:
        source = script.path.read_text(encoding="utf-8")
        for fault in script.faults:
            for option in (fault.option.split()[0], fault.dial or fault.option.split()[0]):
                made_from = option.removeprefix("--").replace("-", "_")  # of a dictionary's keys
                named = f'"{option}"' in source or f'"{made_from}"' in source
                # Or of a field of a dataclass.
                assert named or re.search(rf"^    {made_from}: ", source, re.M), f"{script}: {option}"
        assert source.count("# the training loop") == 1, f"{script}: peers_job.py needs the mark"
        assert script.pairs is not None and script.decoys is not None
        for mend in script.mends:
            assert mend.of(source) != source
    names = [script.path.stem for script in scripts if script.faults]
    assert len(names) == len(set(names))
    labels = {fault.label for script in scripts for fault in script.faults}
    assert len(labels) >= 30
    healthy = [script for script in scripts if not script.faults]
    assert len(healthy) >= 15


SLEEPS = """
import sys, time
import torch
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(int(sys.argv[2])):
    time.sleep(float(sys.argv[1]))
    optimizer.step()
"""


@pytest.mark.parametrize("steps", [(60, 60), (60, 25), (25, 60)])
def test_two_jobs_that_take_turns_are_each_measured_by_their_own_steps(accuracy, tmp_path, steps):
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS, encoding="utf-8")
    off, on = (("0.01", str(steps[0])), ("0.02", str(steps[1])))
    off_ms, on_ms = accuracy.server.in_turn(script, off, on)
    assert off_ms >= 10 and on_ms >= 20, "no step is longer or shorter for the turns"
    assert on_ms / off_ms == pytest.approx(2.0, rel=0.35)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_job_that_fails_in_its_turn_says_so_and_the_other_ends(accuracy, tmp_path, failing):
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS, encoding="utf-8")
    arms = [("0.01", "30"), ("0.01", "30")]
    arms[failing] = ("text", "30")
    with pytest.raises(accuracy.server.JobFailed, match=r"sleeps\.py text 30: exit status 1"):
        accuracy.server.in_turn(script, *arms)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("beside", [False, True])
def test_a_size_is_found_from_what_a_unit_adds(accuracy, monkeypatch, beside):
    """A base of 10 ms and 0.5 ms per unit: 20 % of the step are 2.5 ms, five units."""
    script = next(s for s in accuracy.scripts.scripts("tuning") if s.path.stem == "shapes_cnn")
    fault = accuracy.scripts.Fault(label="slow-collate", option="--boxes", probe=20, beside=beside)
    bench = accuracy.truth.Bench()

    def step_ms(arguments):
        return 10 + 0.5 * (float(arguments[-1]) if arguments else 0.0)

    def run(_, script, arguments):
        return accuracy.server.Job(step_ms=step_ms(arguments), findings=(), abstained=(), status="ok")

    def in_turn(path, off, on):
        return step_ms(off), step_ms(on)

    monkeypatch.setattr(accuracy.truth.Bench, "run", run)
    monkeypatch.setattr(accuracy.truth, "in_turn", in_turn)
    assert bench.sized(script, fault, 20) == ((), ("--boxes", "5"))
    cell = accuracy.truth.Cell(script=script, kind="single", faults=(fault,), severity=20)
    assert bench.answer(cell).true_share == pytest.approx(0.2)


@pytest.mark.parametrize(("label", "share"), [("checkpoint-stall", 0.5), ("slow-collate", 0.25)])
def test_what_is_saved_may_grow_so_its_truth_is_of_as_many_steps_as_are_judged(
    accuracy, monkeypatch, label, share
):
    """A step saves what was gathered so far: 10 ms, and 10 ms in the mean of a run three times as long."""
    script = next(s for s in accuracy.scripts.scripts("tuning") if s.path.stem == "shapes_cnn")
    fault = accuracy.scripts.Fault(label=label, option="--gathered")

    def step_ms(arguments):
        saved_ms = 10.0 if "--steps" in arguments else 10 / 3
        return 10 + (saved_ms if "--gathered" in arguments else 0.0)

    def run(_, script, arguments):
        return accuracy.server.Job(step_ms=step_ms(arguments), findings=(), abstained=(), status="ok")

    monkeypatch.setattr(accuracy.truth.Bench, "run", run)
    monkeypatch.setattr(accuracy.truth, "in_turn", lambda _, off, on: (step_ms(off), step_ms(on)))
    cell = accuracy.truth.Cell(script=script, kind="single", faults=(fault,))
    assert accuracy.truth.Bench().answer(cell).true_share == pytest.approx(share)


@pytest.mark.parametrize("wanted", [0.05, 0.2, 0.4])
@pytest.mark.parametrize(
    ("added", "first", "limits"),
    [
        pytest.param(lambda size: 0.1 * size, 10, (0.05, 160), id="goes with its size"),
        pytest.param(lambda rows: 40 / rows, 40, (1024, 4), id="diluted by the rows of the batch"),
        pytest.param(lambda ms: max(0.0, (ms - 100) / 100), 300, (60, 600), id="nothing below a limit"),
    ],
)
def test_the_size_of_a_fault_is_found_within_five_points_of_what_is_wanted(
    accuracy, added, first, limits, wanted
):
    def share_at(size: float) -> float:
        return added(size) / (1 + added(size))

    tried = []
    size = accuracy.sizing.find_size(share_at, wanted, first=first, limits=limits, tried=tried)
    assert share_at(size) == pytest.approx(wanted, abs=0.05)
    assert len(tried) <= accuracy.sizing.ROUNDS


def test_a_hidden_fault_may_claim_ten_points_more_than_it_costs(accuracy, answer):
    decoy = {"faults": ("slow-collate", "logging-io"), "kind": "decoy", "true": 0.0}
    assert accuracy.score.is_right(answer(("logging-io", 0.3), ("slow-collate", 0.08), **decoy))
    assert not accuracy.score.is_right(answer(("logging-io", 0.3), ("slow-collate", 0.12), **decoy))
