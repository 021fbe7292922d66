"""Two runs to faster, slower, or cannot tell. Never a win where there is none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from diagnose.analysis.compare import MIN_STEPS, StepSeries, compare, differences
from diagnose.analysis.predictions import gone_findings
from diagnose.analysis.profile import load_job_series, load_profile, load_series
from diagnose.analysis.recorders import OTHERWISE, measured_otherwise
from diagnose.core.comparison import Change, Comparison, Outcome, Unit
from diagnose.core.finding import Finding
from diagnose.core.ledger import RECORDER
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RunInfo
from diagnose.report import FaultChanges, Terminal, comparison_json, comparison_text
from tests.recorded import USUAL_MS, manifest, steps, writer
from tests.running import run

MS = 1_000_000
Floats = npt.NDArray[np.float64]

SCENES = {  # standard deviations between hosts, and between runs on one host
    "quiet machine": (0.0, 0.005),
    "other shared host": (0.02, 0.01),
    "other noisy host": (0.05, 0.02),
}
NUM_STEPS = 400
NUM_PAIRS = 150


def autocorrelated(rng: np.random.Generator, pairs: int, steps: int, sd: float, rho: float) -> Floats:
    """AR(1) noise, one run per row."""
    shocks_RN = rng.standard_normal((pairs, steps)) * sd * np.sqrt(1 - rho**2)
    noise_RN = np.empty((pairs, steps))
    noise_RN[:, 0] = rng.standard_normal(pairs) * sd
    for step in range(1, steps):
        noise_RN[:, step] = rho * noise_RN[:, step - 1] + shocks_RN[:, step]
    return noise_RN


def simulated(rng: np.random.Generator, scene: str, slower: float = 1.0) -> Iterator[StepSeries]:
    """Runs of steps as they are on real machines: correlated, with spikes, bursts, and a mood per run."""
    host_sd, run_sd = SCENES[scene]
    shape = (NUM_PAIRS, NUM_STEPS)
    mood_R = rng.standard_normal(NUM_PAIRS) * host_sd + rng.standard_t(4, NUM_PAIRS) / np.sqrt(2) * run_sd
    time_RN = 40 * MS * slower * np.exp(autocorrelated(rng, *shape, 0.04, 0.7) + mood_R[:, None])
    time_RN *= np.where(rng.random(shape) < 0.02, 1 + rng.pareto(2.2, shape), 1)
    for row in time_RN:
        start = int(rng.exponential(940))
        row[start : start + int(rng.exponential(60)) + 1] *= 1.12
    data_RN = 0.3 * time_RN * np.exp(autocorrelated(rng, *shape, 0.2, 0.7))
    for time_N, data_N in zip(time_RN, data_RN, strict=True):
        phases = {Phase.DATA_WAIT: data_N, Phase.FORWARD: 0.5 * time_N, Phase.OTHER: 0.2 * time_N}
        yield StepSeries(
            step_time_ns=sum(phases.values()), phase_time_ns=phases, samples=np.full(NUM_STEPS, 32)
        )


def steady(step_ms: float, steps: int = 200, *, samples: int = 32, data_ms: float = 0.0) -> StepSeries:
    """A run of which every step takes exactly the same time."""
    phases = {
        Phase.DATA_WAIT: np.full(steps, data_ms * MS),
        Phase.FORWARD: np.full(steps, (step_ms - data_ms) * MS),
    }
    return StepSeries(
        step_time_ns=np.full(steps, step_ms * MS), phase_time_ns=phases, samples=np.full(steps, samples)
    )


def outcomes(comparison: Comparison) -> dict[str, str]:
    return {change.name: change.outcome.value for change in (*comparison.metrics, *comparison.phases)}


@pytest.mark.parametrize("scene", SCENES)
def test_runs_of_the_same_code_are_told_apart_in_at_most_two_of_a_hundred_pairs(scene: str) -> None:
    rng = np.random.default_rng(20261120)
    pairs = zip(simulated(rng, scene), simulated(rng, scene), strict=True)
    alarms = sum(set(outcomes(compare(*pair)).values()) != {"cannot_tell"} for pair in pairs)
    print(f"{scene}: {100 * alarms / NUM_PAIRS:.1f} % of identical pairs differ in some metric or phase")
    assert alarms <= 0.02 * NUM_PAIRS


@pytest.mark.parametrize(
    ("scene", "least"), [("quiet machine", 0.95), ("other shared host", 0.9), ("other noisy host", 0.75)]
)
@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.3, "slower"), pytest.param(0.7, "faster", marks=pytest.mark.extended)]
)
def test_a_change_of_thirty_percent_is_found(scene: str, least: float, factor: float, outcome: str) -> None:
    rng = np.random.default_rng(20261121)
    pairs = zip(simulated(rng, scene), simulated(rng, scene, factor), strict=True)
    found = [outcomes(compare(*pair))["step_time"] for pair in pairs]
    print(f"{scene}, x {factor}: {100 * found.count(outcome) / NUM_PAIRS:.0f} % found")
    assert found.count(outcome) >= least * NUM_PAIRS
    assert set(found) <= {outcome, "cannot_tell"}


def test_a_change_of_ten_percent_is_not_claimed_from_two_runs_however_steady() -> None:
    comparison = compare(steady(40), steady(36))
    assert set(outcomes(comparison).values()) == {"cannot_tell"}
    assert comparison.headline.noise_share == pytest.approx(0.193, abs=0.001), "the floor alone"


def test_a_drift_inside_a_run_widens_the_noise() -> None:
    drifting = steady(40)
    slope = np.linspace(0.5, 1.5, 200)
    drifting = StepSeries(
        step_time_ns=drifting.step_time_ns * slope,
        phase_time_ns={phase: time * slope for phase, time in drifting.phase_time_ns.items()},
        samples=drifting.samples,
    )
    assert outcomes(compare(steady(40), steady(56)))["step_time"] == "slower"
    assert outcomes(compare(drifting, steady(56)))["step_time"] == "cannot_tell"


def test_the_phase_that_changed_is_told_from_those_that_did_not() -> None:
    comparison = compare(steady(40, data_ms=20), steady(22, data_ms=2))
    assert outcomes(comparison) == {
        "samples_per_s": "faster",
        "step_time": "faster",
        "data_wait": "faster",
        "forward": "cannot_tell",
    }
    data = comparison.phase(Phase.DATA_WAIT)
    assert data is not None
    assert (data.before, data.after, data.change_share) == (20 * MS, 2 * MS, -0.9)


def test_a_tiny_phase_that_doubles_is_no_finding() -> None:
    comparison = compare(steady(40, data_ms=0.1), steady(40.1, data_ms=0.2))
    assert outcomes(comparison)["data_wait"] == "cannot_tell"


def test_a_phase_that_only_one_run_measured_is_not_compared_with_zero() -> None:
    without = steady(40)
    without = StepSeries(
        step_time_ns=without.step_time_ns,
        phase_time_ns={Phase.FORWARD: without.phase_time_ns[Phase.FORWARD]},
        samples=without.samples,
    )
    data = compare(without, steady(80, data_ms=40)).phase(Phase.DATA_WAIT)
    assert data is not None
    assert (data.before, data.after, data.outcome) == (None, 40 * MS, Outcome.CANNOT_TELL)
    assert data.reason == "not measured in the first run"


@pytest.mark.parametrize("steps", [0, 1, MIN_STEPS - 1])
def test_too_few_steps_give_values_but_no_outcome(steps: int) -> None:
    comparison = compare(steady(40, steps), steady(400))
    assert set(outcomes(comparison).values()) == {"cannot_tell"}
    assert comparison.num_steps == (steps, 200)
    assert comparison.metrics[1].after == 400 * MS
    if steps:
        assert comparison.headline.reason == f"{steps} and 200 steps; each run needs 40"


def test_without_samples_the_step_time_decides() -> None:
    comparison = compare(steady(40, samples=0), steady(80, samples=0))
    assert comparison.headline.name == "step_time"
    assert comparison.headline.outcome is Outcome.SLOWER


def test_other_batch_sizes_are_judged_by_samples_and_said() -> None:
    comparison = compare(steady(40, samples=32), steady(60, samples=128))
    assert comparison.headline.outcome is Outcome.FASTER
    assert comparison.notes == (
        "not the same samples per step: 32 and 128; compare samples/s, not times per step",
    )


def test_what_differs_between_the_runs_besides_the_code_is_said() -> None:
    one = RunInfo(id="a", script="train.py", argv=("--lr", "1"), device="cpu", torch="2.12.0")
    other = RunInfo(id="b", script="train.py", argv=("--lr", "2"), device="cuda", torch="2.13.0")
    assert differences(one, one) == ()
    assert differences(one, other) == (
        "not the same arguments: --lr 1 and --lr 2",
        "not the same device: cpu and cuda",
        "not the same torch: 2.12.0 and 2.13.0",
    )
    bare = replace(one, argv=())
    assert differences(bare, one) == ("not the same arguments: none and --lr 1",)


def test_a_difference_as_large_as_the_noise_is_not_yet_one() -> None:
    change = Change(name="step_time", unit=Unit.NS, before=10.0, after=12.0, noise=2.0)
    assert change.outcome is Outcome.CANNOT_TELL
    assert Change(name="step_time", unit=Unit.NS, before=10.0, after=12.0, noise=float("nan")).outcome is (
        Outcome.CANNOT_TELL
    )


def test_series_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"arrays of one length, not \[2, 3\]"):
        StepSeries(step_time_ns=np.ones(3), phase_time_ns={}, samples=np.ones(2))


RUNS = (RunInfo(id="main", script="train.py"), RunInfo(id="faster-loader", script="train.py"))


def test_comparison_text_shows_every_outcome_and_that_one_pair_is_not_proof() -> None:
    text = comparison_text(compare(steady(40, data_ms=20), steady(22, data_ms=2)), RUNS, Terminal(width=96))
    assert (
        text.splitlines()
        == """\
A, before: main, train.py, 200 steps
B, after:  faster-loader, train.py, 200 steps

  faster: 800 -> 1,455 samples/s, +82 %; two single runs must differ by 27 % to be told apart

  Phases are mean times per step. 'needed' is the change beyond which two single runs differ by
  more than chance.
  per step                  A         B  change  needed  outcome
  samples/s               800     1,455   +82 %    27 %  faster
  step time, median  40.00 ms  22.00 ms   -45 %    15 %  faster
  data wait          20.00 ms   2.00 ms   -90 %    13 %  faster
  forward            20.00 ms  20.00 ms     0 %    18 %  cannot tell

  One run of each cannot separate a change of the code from a change of the machine between the
  runs. To be sure, run both again in turn (A B B A), and see whether the order of the results
  stays.
""".splitlines()
    )


def test_comparison_text_of_too_few_steps_says_how_many_are_needed() -> None:
    text = comparison_text(compare(steady(40, 12), steady(40, 9)), RUNS, Terminal(width=96))
    assert "\n  cannot tell: 12 and 9 steps; each run needs 40\n" in text


def test_comparison_json_is_in_milliseconds_with_the_noise_of_every_quantity() -> None:
    comparison = compare(steady(40, data_ms=20), steady(22, data_ms=2))
    report = json.loads(json.dumps(comparison_json(comparison, RUNS), allow_nan=False))
    assert (report["schema"], report["outcome"], report["judged_by"]) == (1, "faster", "samples_per_s")
    assert (report["before"]["id"], report["after"]["id"]) == ("main", "faster-loader")
    data = next(phase for phase in report["phases"] if phase["name"] == "data_wait")
    assert data.pop("noise") == pytest.approx(2.64, abs=0.01)
    assert data == {
        "name": "data_wait",
        "unit": "ms",
        "before": 20.0,
        "after": 2.0,
        "change": -0.9,
        "outcome": "faster",
        "reason": "",
    }


# -- recorders that do not measure the same


def two_ranks(folder: Path, *, recorder: int | None, met: bool) -> Path:
    """A run of two ranks that wait 4 ms a step for each other's gradients, measured or not."""
    facts = {} if recorder is None else {"recorder": recorder}
    for rank in range(2):
        file = writer(manifest(folder), rank, world_size=2, device="cpu", **facts)
        wait = {"communication": 4.0} if met else {}
        rows = steps(0, 200, {**USUAL_MS, "backward": 20.0 if met else 24.0, **wait}, spread=0.0)
        file.add_steps(rows)
        if met:
            file.add_meetings([(row[0] - 9 * MS, row[0] - 5 * MS) for row in rows])
        file.set_meta({"state": {"steps": 200, "finished": True}})
        file.close()
    return folder


def test_samples_per_s_are_those_of_all_ranks(tmp_path: Path) -> None:
    """As the report has them: twice the ranks with as many samples each do twice the work."""
    two = two_ranks(tmp_path / "two", recorder=RECORDER, met=False)
    one = two_ranks(tmp_path / "one", recorder=RECORDER, met=False)
    (one / "rank1.sqlite").unlink()
    profiles = load_profile(one), load_profile(two)
    found = compare(*(load_job_series(run, of) for run, of in zip((one, two), profiles, strict=True)))
    (change,) = [change for change in found.metrics if change.name == "samples_per_s"]
    rates = [profile.throughput.samples_per_s for profile in profiles]
    assert [change.before, change.after] == pytest.approx(rates)
    assert rates[1] == pytest.approx(2 * rates[0])
    assert "not the same samples per step: 32 and 64" in "".join(found.notes)


def judged(before: Path, after: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    profiles = load_profile(before), load_profile(after)
    found = compare(
        load_series(before),
        load_series(after),
        otherwise=measured_otherwise(*profiles),
    )
    return {change.name: change.reason or change.outcome.value for change in found.phases}, found.notes


def test_communication_that_an_older_recorder_took_for_backward_does_not_appear(tmp_path: Path) -> None:
    old = two_ranks(tmp_path / "old", recorder=None, met=False)
    new = two_ranks(tmp_path / "new", recorder=RECORDER, met=True)
    for pair in ((old, new), (new, old)):
        found, notes = judged(*pair)
        assert found["communication"] == found["backward"] == "measured otherwise"
        assert found["forward"] == "cannot_tell"
        assert notes == (OTHERWISE,)


def test_the_wait_for_buffers_that_an_older_recorder_took_for_forward_does_not_appear(
    tmp_path: Path,
) -> None:
    def run_of(name: str, recorder: int, **sent: Any) -> Profile:
        found = load_profile(two_ranks(tmp_path / name, recorder=recorder, met=True))
        return replace(found, program=replace(found.program, ddp=(Ddp(**sent),)))

    old, new = run_of("old", 2, broadcasts_buffers=True), run_of("new", RECORDER, broadcasts_buffers=True)
    moved = {Phase.FORWARD, Phase.COMMUNICATION}
    assert measured_otherwise(old, new) == measured_otherwise(new, old) == moved
    assert measured_otherwise(old, old) == measured_otherwise(new, new) == set()
    assert measured_otherwise(run_of("without", 2), new) == set()


def test_communication_that_really_appears_is_said_to(tmp_path: Path) -> None:
    """One recorder; or a first run that recorded its meetings before recorders had a number."""
    without = two_ranks(tmp_path / "without", recorder=RECORDER, met=False)
    new = two_ranks(tmp_path / "new", recorder=RECORDER, met=True)
    assert judged(without, new)[0]["communication"] == "slower"
    nearly_new = two_ranks(tmp_path / "nearly", recorder=None, met=True)
    assert judged(nearly_new, new) == (judged(new, new)[0], ())


def test_a_finding_that_only_one_recorder_can_have_is_neither_new_nor_gone(tmp_path: Path) -> None:
    def lost_in(phase: Phase, rule: str) -> Finding:
        return Finding(
            rule=rule,
            summary="",
            lost_ns={phase: 4e6},
            low_ns=0.0,
            high_ns=5e6,
            assumption="",
            evidence=(),
            fix="",
        )

    finding = lost_in(Phase.COMMUNICATION, "exposed-communication")
    other = lost_in(Phase.OPTIMIZER, "slow-optimizer")
    old = replace(load_profile(two_ranks(tmp_path / "old", recorder=None, met=False)), num_rules=80)
    new = load_profile(two_ranks(tmp_path / "new", recorder=RECORDER, met=True))
    new = replace(new, num_rules=80, findings=(finding, other))
    assert gone_findings(new, old) == (other,)
    became = {row[0]: row[3] for row in FaultChanges(before=old, after=new).rows}
    assert became == {"exposed-communication": "cannot tell", "slow-optimizer": "new"}


def test_the_command_says_that_two_runs_were_measured_otherwise(tmp_path: Path) -> None:
    old = two_ranks(tmp_path / "old", recorder=None, met=False)
    new = two_ranks(tmp_path / "new", recorder=RECORDER, met=True)
    ended = run(sys.executable, "-m", "diagnose", "compare", old, new, "--json", "-", cwd=tmp_path)
    report = json.loads(ended.stdout)
    assert (report["before"]["recorder"], report["after"]["recorder"]) == (None, RECORDER)
    assert OTHERWISE in report["notes"]
