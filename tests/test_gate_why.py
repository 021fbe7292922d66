"""What a loss is attributed to: the phase, the faults and the settings, or nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.core.finding import Abstention, Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine, Throughput
from diagnose.core.program import Loader, Program
from diagnose.gate.attribution import chance, growth
from diagnose.gate.cause import Kind, Why
from diagnose.gate.result import Metric
from diagnose.gate.why import reasons
from tests.attributed import AFTER, BEFORE, MS, QUIET, STEP_MS, attributed, pairs_of, version
from tests.running import run, write

TOTAL_MS = sum(STEP_MS.values())
SHARED = (0.02, 0.03)
"""Standard deviations of a run's speed, and of each phase of it on its own."""


@pytest.mark.parametrize("phase", [phase for phase, ms in STEP_MS.items() if ms >= 2])
@pytest.mark.parametrize("noise", [QUIET, SHARED], ids=["quiet", "shared"])
@pytest.mark.parametrize("size", [0.05, 0.1], ids=["5%", "10%"])
def test_the_phase_that_lost_the_time_is_named_first(
    phase: Phase, noise: tuple[float, float], size: float
) -> None:
    found = [attributed(*pairs_of(seed, 20, noise, **{phase.value: size * TOTAL_MS})) for seed in range(40)]
    first = [why.phases[0].phase if why.phases else None for why in found]
    assert first.count(phase) >= 38, "in 95 of 100"
    assert all(why.kind is not Kind.EVENLY for why in found)


def test_without_a_loss_no_phase_is_named() -> None:
    named = [attributed(*pairs_of(seed, 10, SHARED)).phases for seed in range(100)]
    assert sum(map(bool, named)) <= 5


def test_phases_that_all_grew_alike_are_not_one_fault() -> None:
    slower = {phase.value: 0.08 * ms for phase, ms in STEP_MS.items()}
    why = attributed(*pairs_of(1, **slower))
    assert why.kind is Kind.EVENLY
    assert {each.phase for each in why.phases} == {
        Phase.DATA_WAIT,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    }


def test_a_larger_model_is_forward_and_backward() -> None:
    why = attributed(*pairs_of(2, forward=3.0, backward=6.0))
    assert why.kind is Kind.PHASES
    assert [each.phase for each in why.phases] == [Phase.BACKWARD, Phase.FORWARD]
    assert sum(each.part for each in why.phases) == pytest.approx(1, abs=0.2)


def test_time_that_moved_from_one_phase_to_another_is_told_from_both_sides() -> None:
    why = attributed(*pairs_of(3, forward=14.0, data_wait=-6.0))
    assert [each.phase for each in why.phases] == [Phase.FORWARD]
    assert why.phases[0].part > 1
    assert [each.phase for each in why.shrank] == [Phase.DATA_WAIT]


def test_a_growth_lost_in_noise_is_not_pinned_on_a_phase() -> None:
    why = attributed(*pairs_of(4, 7, (0.2, 0.4), forward=2.0))
    assert why.kind is Kind.CANNOT_TELL
    assert why.phases == ()
    assert why.reason


def test_four_pairs_are_too_few() -> None:
    why = attributed(*pairs_of(5, 4, forward=10.0))
    assert why.kind is Kind.CANNOT_TELL
    assert why.reason == "4 pairs of runs have records; 5 are needed"


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("phase", [Phase.DATA_WAIT, Phase.FORWARD, Phase.CHECKPOINT])
def test_a_huge_loss_is_attributed_by_the_few_pairs_that_told_it(phase: Phase, count: int) -> None:
    for seed in range(20):
        why = attributed(*pairs_of(seed, count, SHARED, **{phase.value: 1.5 * TOTAL_MS}))
        assert (why.kind, why.num_pairs) == (Kind.PHASES, count)
        assert [each.phase for each in why.phases] == [phase]


def test_few_pairs_name_no_phase_that_is_less_than_half_of_a_huge_loss() -> None:
    parts = {"data_wait": 0.45, "forward": 0.45, "other": 0.45}
    why = attributed(*pairs_of(5, 3, **{name: part * TOTAL_MS for name, part in parts.items()}))
    assert (why.kind, why.phases) == (Kind.CANNOT_TELL, ())
    assert why.reason == "no phase is half of the loss or more, which 3 pairs would tell"
    slower = {phase.value: 1.2 * ms for phase, ms in STEP_MS.items()}
    assert attributed(*pairs_of(5, 3, **slower)).kind is Kind.EVENLY
    assert attributed(*pairs_of(5, 2, forward=2 * TOTAL_MS)).kind is Kind.CANNOT_TELL


def test_no_records_at_all_are_no_cause() -> None:
    assert attributed([], []).kind is Kind.CANNOT_TELL


def test_one_pair_that_a_neighbour_hit_does_not_move_the_estimate() -> None:
    quiet = growth([100.0] * 10, [105.0] * 10)
    hit = growth([100.0] * 10, [105.0] * 9 + [900.0])
    assert (quiet.ns, quiet.low_ns, quiet.high_ns) == (5.0, 5.0, 5.0)
    assert hit.ns == 5.0


FAULT = Finding(
    rule="host-sync",
    summary="The loop waits for the device.",
    lost_ns={Phase.FORWARD: 8.0 * MS},
    low_ns=6.0 * MS,
    high_ns=8.0 * MS,
    assumption="",
    evidence=(),
    fix="",
    file="/head/train.py",
    line=7,
)


def test_a_fault_that_only_the_second_version_has_is_new() -> None:
    before, after = pairs_of(9, forward=10.0)
    after = [replace(run, findings=(FAULT,)) for run in after]
    (new,) = attributed(before, after).findings
    assert (new.rule, new.file, new.line) == ("host-sync", "train.py", 7)
    assert (new.before, new.after) == ((0, 10), (10, 10))


def test_a_fault_that_comes_and_goes_is_not_new() -> None:
    before, after = pairs_of(10, forward=10.0)
    before = [replace(run, findings=(FAULT,) * (number % 2)) for number, run in enumerate(before)]
    after = [replace(run, findings=(FAULT,) * (number % 3 > 0)) for number, run in enumerate(after)]
    assert attributed(before, after).findings == ()


def test_a_fault_that_the_first_version_could_not_be_asked_for_is_not_new() -> None:
    before, after = pairs_of(11, forward=10.0)
    before = [replace(run, abstained=(Abstention(rule="host-sync", missing="x"),)) for run in before]
    after = [replace(run, findings=(FAULT,)) for run in after]
    assert attributed(before, after).findings == ()


def test_chance_is_that_of_fishers_exact_test() -> None:
    assert chance((0, 3), (3, 3)) == pytest.approx(1 / 20)
    assert chance((1, 4), (3, 4)) == pytest.approx(17 / 70)


def test_what_was_set_otherwise_is_told() -> None:
    before, after = pairs_of(12, data_wait=30.0)
    before = [replace(run, program=Program(loaders=(Loader(num_workers=4),))) for run in before]
    after = [replace(run, program=Program(loaders=(Loader(num_workers=0),))) for run in after]
    (fact,) = attributed(before, after).facts
    assert (fact.name, fact.before, fact.after) == ("loader workers", "4", "0")


def test_a_smaller_batch_is_compared_by_the_same_samples() -> None:
    """Half the samples in 60 % of the time: the step is shorter, and each sample takes longer."""
    before, after = pairs_of(14, **{phase.value: -0.4 * ms for phase, ms in STEP_MS.items()})

    def with_samples(run: Profile, samples: float) -> Profile:
        steps_per_s = 1e9 / run.step_time_ns
        rates = Throughput(
            samples_per_s=samples * steps_per_s,
            tokens_per_s=12 * samples * steps_per_s,
            steps_per_s=steps_per_s,
        )
        return replace(run, throughput=rates)

    before = [with_samples(run, 32) for run in before]
    after = [with_samples(run, 16) for run in after]
    why = attributed(before, after)
    assert (why.kind, why.work) == (Kind.EVENLY, "32 samples")
    assert why.step.ns == pytest.approx(0.2 * TOTAL_MS * MS, rel=0.1)
    assert [(fact.before, fact.after) for fact in why.facts] == [("32", "16")]
    assert attributed(before, after, metric=Metric.TOKENS_PER_S).work == "384 tokens"


@pytest.mark.parametrize("metric", [Metric.STEP_MS, Metric.CPU_MS])
def test_a_larger_batch_is_a_loss_where_the_step_is_judged(metric: Metric) -> None:
    """Twice the samples in 110 % of the time is a gain in samples/s alone."""
    before, after = pairs_of(14, forward=10.0)
    before = [replace(run, throughput=Throughput(samples_per_s=320, steps_per_s=10)) for run in before]
    after = [replace(run, throughput=Throughput(samples_per_s=640, steps_per_s=10)) for run in after]
    assert attributed(before, after).kind is Kind.CANNOT_TELL
    why = attributed(before, after, metric=metric)
    assert [each.phase for each in why.phases] == [Phase.FORWARD]
    assert why.step.ns == pytest.approx(10 * MS, rel=0.1)
    assert told(why, metric)[0].startswith("phase: forward took 1")


def test_a_run_without_steps_takes_its_pair_with_it() -> None:
    before, after = pairs_of(15, 6, forward=10.0)
    why = attributed([*before[:3], replace(before[3], phase_time_ns={}), *before[4:]], after)
    assert (why.num_pairs, why.phases[0].phase) == (5, Phase.FORWARD)


def test_a_count_that_varies_from_run_to_run_is_no_change() -> None:
    before, after = pairs_of(13, forward=10.0)
    before = [replace(run, events={"gc": 10 + number}) for number, run in enumerate(before)]
    after = [replace(run, events={"gc": 15 + number}) for number, run in enumerate(after)]
    assert attributed(before, after).facts == ()


TRAIN = """\
import time
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).sum()

def train(steps):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.ones(8, 64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002)
"""
SLOWER = TRAIN.replace(
    "        return self.layer",
    "        until = time.perf_counter() + 0.004\n"
    "        while time.perf_counter() < until:\n"
    "            pass\n"
    "        return self.layer",
)
PAIRS = """\
import importlib.util, json, sys
from dataclasses import asdict
from pathlib import Path
import torch
import diagnose
from diagnose.gate.attribution import Runs, attribute
from diagnose.gate.result import Metric

torch.set_num_threads(1)
sides = []
for name in ("base", "head"):
    spec = importlib.util.spec_from_file_location(name, Path(name, "train.py").absolute())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sides.append((Path(name).absolute(), module.train, []))
for number in range(10):
    root, train, profiles = sides[(number + 1) // 2 % 2]  # base, head, head, base
    diagnose.attach(run_dir=f"runs/{number}")
    train(45)
    profiles.append(diagnose.detach())
runs = [Runs(root=root, profiles=tuple(profiles)) for root, _, profiles in sides]
why = attribute(*runs, Metric.SAMPLES_PER_S)
print(json.dumps(asdict(why)))
"""


@pytest.mark.extended
@pytest.mark.alone
def test_real_runs_lead_to_the_phase_and_the_line_that_grew(tmp_path: Path) -> None:
    """Ten short runs, in one process so that torch is imported once."""
    for side, text in (("base", TRAIN), ("head", SLOWER)):
        write(tmp_path / side / "train.py", text)
    ended = run(sys.executable, write(tmp_path / "pairs.py", PAIRS), cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    why = json.loads(ended.stdout.splitlines()[-1])
    assert (why["kind"], why["num_pairs"]) == ("phases", 5)
    assert why["phases"][0]["phase"] == "forward"
    assert why["phases"][0]["growth"]["ns"] > 3 * MS
    grown = [(line["file"], line["line"], line["in_diff"]) for line in why["lines"]]
    assert grown, why
    assert set(grown) <= {("train.py", 11, True), ("train.py", 12, True)}


def told(why: Why, metric: Metric = Metric.SAMPLES_PER_S) -> list[str]:
    return [f"{reason.kind}: {reason.text}" for reason in reasons(why, metric)]


def test_the_sentences_name_the_phase_the_line_and_the_fault(tmp_path: Path) -> None:
    before, after = pairs_of(6, noise=(0.0, 0.0), forward=10.0)
    base, head = tmp_path / "base", tmp_path / "head"
    before = [version(base, BEFORE, {(7, "step"): 24.0, (8, "step"): 40.0}, run) for run in before]
    after = [version(head, AFTER, {(10, "step"): 34.0, (11, "step"): 40.0}, run) for run in after]
    after = [replace(run, findings=(replace(FAULT, file=str(head / "train.py")),)) for run in after]
    why = attributed(before, after, base, head)
    assert told(why) == [
        "phase: forward took 10.00 ms (10.00 to 10.00) longer per step (it took 25.0 ms), 100 % of the "
        "loss",
        "line: `loss = model(batch, slow=True)` in step took 10.00 ms (10.00 to 10.00) longer per step, in "
        "forward; new or changed here",
        "finding: new fault host-sync: The loop waits for the device. (in 10 of 10 runs, before in 0 of "
        "10)",
    ]
    places = [(reason.file, reason.line) for reason in reasons(why, Metric.STEP_MS)]
    assert places == [("", 0), ("train.py", 10), ("train.py", 7)]


def test_what_is_not_time_of_the_steps_is_not_pinned_on_a_phase() -> None:
    why = attributed(*pairs_of(16, forward=10.0))
    assert told(why, Metric.PEAK_MEMORY) == [
        f"phase: {Metric.PEAK_MEMORY.label} is not time of the steps: no phase can explain it"
    ]


def test_no_name_of_the_users_becomes_a_path_to_annotate_outside_the_repository() -> None:
    before, after = pairs_of(17, forward=10.0)
    line = SourceLine(
        phase=Phase.FORWARD, file="/usr/lib/\x1b[31m.py", line=3, function="<lambda>", share=0.3, text="x"
    )
    after = [replace(run, where=(line,)) for run in after]
    found = list(reasons(attributed(before, after), Metric.STEP_MS))
    assert [reason.file for reason in found] == [""] * len(found)
    assert any("/usr/lib/" in reason.text for reason in found)
