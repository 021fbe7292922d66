"""Pairs in turn, the time they may take, the machine they are made on, and worktrees."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.core.errors import DiagnoseError
from diagnose.gate import instructions
from diagnose.gate.bisect import row_of_commits
from diagnose.gate.judging import judge
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.noise import advice, causes
from diagnose.gate.pairs import HEAD, Asked, MeasureRun, run_pairs
from diagnose.gate.result import MachineState, MeasuredRun, Metric, Pair, TrainingFailed, Verdict
from diagnose.gate.words import change, sensitivity
from diagnose.gate.worktrees import git as own_git
from diagnose.gate.worktrees import (
    parse_range,
    repository_of,
    resolve_range,
    uncommitted,
    worktrees,
)
from tests.gates import commit, git, repository, scripted


def test_without_a_batch_size_the_step_time_is_judged() -> None:
    paired = run_pairs(scripted({"base": 10, "head": 11}), Asked())
    assert paired.judgement.metric is Metric.STEP_MS
    assert paired.judgement.verdict is Verdict.REGRESSION
    assert paired.judgement.drop == pytest.approx(0.1)


@pytest.mark.parametrize("side", ["base", "head"])
def test_a_batch_size_that_one_version_alone_tells_leaves_no_verdict(side: str) -> None:
    """Its step may take longer for holding more."""
    measure = scripted({"base": 10, "head": 18})

    def told_by_one(number: int, name: str, plan: RunPlan) -> MeasuredRun:
        run = measure(number, name, plan)
        rate = {Metric.SAMPLES_PER_S: 3200.0} if name.startswith(side) else {}
        return replace(run, figures={**run.figures, **rate})

    paired = run_pairs(told_by_one, Asked())
    other = {"base": "head", "head": "base"}[side]
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert paired.stopped == f"a batch size could be read in {side}-00 and not in {other}-00"
    assert len(paired.runs) == 2
    assert "--metric step_ms" in advice((), Metric.SAMPLES_PER_S, (), paired.stopped, may_take_turns=True)
    assert run_pairs(told_by_one, Asked(metric=Metric.STEP_MS)).judgement.verdict is Verdict.REGRESSION


def test_all_runs_that_count_measure_the_same_steps_after_the_same_warm_up() -> None:
    measure = scripted({"base": 10, "head": 10})
    run_pairs(measure, Asked())
    assert {plan.finds_warmup for plan in measure.plans[:2]} == {True}
    counted = {(plan.steps, plan.warmup, plan.finds_warmup) for plan in measure.plans[2:]}
    assert counted == {(300, 30, False)}, "3 s of steps of 10 ms"


def test_a_budget_shortens_the_runs_and_then_ends_them() -> None:
    now = [0.0]
    measure = scripted({"base": 100, "head": 100}, wall_s=5.0)

    def slow(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        now[0] += 5.0
        return measure(side, name, plan)

    paired = run_pairs(slow, Asked(budget_s=60.0), clock=lambda: now[0])
    assert measure.plans[2].steps == 40, "never below what can be judged"
    assert now[0] <= 60.0
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert paired.stopped == "the budget of 1 min was used up by 12 runs"
    assert change(paired.judgement) == "step time is 0.0 % higher", "five pairs have no interval of 95 %"
    assert sensitivity(paired.judgement) == "5 pairs: too few to say which drop would be found"


def test_a_budget_without_time_for_a_verdict_is_not_used_up() -> None:
    now = [0.0]
    measure = scripted({"base": 1000, "head": 1000}, wall_s=300.0)

    def slow(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        now[0] += 300.0
        return measure(side, name, plan)

    said: list[str] = []
    asked = Asked(budget_s=1800.0, steps=200)
    paired = run_pairs(slow, asked, clock=lambda: now[0], progress=said.append)
    assert now[0] == 600.0, "two rehearsals"
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert "not even 3 pairs fit into the rest of the budget of 30 min" in paired.stopped
    assert said[0].endswith("time for 2 pairs")
    assert "--budget" in advice((), Metric.STEP_MS, (), paired.stopped, may_take_turns=True)


@pytest.mark.parametrize(
    ("metric", "needs"),
    [(Metric.INSTRUCTIONS, "perf"), (Metric.PEAK_DEVICE_MEMORY, "GPU"), (Metric.STARTUP, "Choose another")],
)
def test_what_cannot_be_measured_is_not_blamed_on_the_seeds(metric: Metric, needs: str) -> None:
    said = advice((), metric, (), "", may_take_turns=True, not_measured=True)
    assert needs in said
    assert "--metric step_ms" in said


def in_simulated_time(
    base_ms: float, head_ms: float
) -> tuple[MeasureRun, Callable[[], float], list[RunPlan]]:
    """A measuring function whose runs take a second, and their steps; a clock; the plans it was given."""
    now, plans = [0.0], []

    def measure(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        steps = plan.steps if not plan.finds_warmup else 200
        run = scripted({"base": base_ms, "head": head_ms}, steps=steps)(side, name, plan)
        run = replace(run, wall_s=run.startup_s + (run.warmup + steps) * run.step_s)
        plans.append(plan)
        now[0] += run.wall_s
        return run

    return measure, lambda: now[0], plans


def test_a_budget_is_fitted_to_both_versions() -> None:
    """By the faster one's steps, six pairs would fit, which do not tell."""
    measure, clock, plans = in_simulated_time(100, 300)
    paired = run_pairs(measure, Asked(budget_s=400.0), clock=clock)
    assert plans[2].steps == 40
    assert clock() <= 400.0
    assert len(paired.pairs) == 7
    assert paired.judgement.verdict is Verdict.REGRESSION


def test_a_head_that_takes_far_longer_fails_by_the_few_pairs_there_was_time_for() -> None:
    measure, clock, _ = in_simulated_time(100, 500)
    paired = run_pairs(measure, Asked(budget_s=900.0, steps=200), clock=clock)
    assert paired.stopped.startswith("the budget of 15 min was used up")
    assert len(paired.pairs) == 5
    assert paired.judgement.verdict is Verdict.REGRESSION
    assert sensitivity(paired.judgement) == "5 pairs, each with more than twice the cost that is allowed"


@pytest.mark.parametrize(
    "base_s, budget_s, given_s",
    [(2.0, math.inf, 300.0), (60.0, math.inf, 600.0), (2.0, 100.0, 50.0), (10.0, 150.0, 100.0)],
    ids=["a short run", "a long run", "a small budget", "a budget"],
)
def test_a_head_that_hangs_fails(base_s: float, budget_s: float, given_s: float) -> None:
    given = []

    def measure(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        given.append(plan.timeout_s)
        if side == HEAD:
            late = OutOfTime()
            late.last_lines = ("waiting for the lock",)
            raise late
        return scripted({"base": 10}, wall_s=base_s)(side, name, plan)

    with pytest.raises(TrainingFailed) as failed:
        run_pairs(measure, Asked(budget_s=budget_s), clock=lambda: 0.0)
    assert given[0] == budget_s, "nothing is known of the base"
    assert given[1] == given_s
    assert failed.value.failure.reason == (
        f"head-00 had not ended after {given_s:.0f} s, where such a run takes {base_s:.0f} s: "
        "it hangs, or is very much slower"
    )
    assert failed.value.failure.last_lines == ("waiting for the lock",)


def test_a_budget_that_ends_before_a_run_could_is_no_hang() -> None:
    def measure(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        if side == HEAD:
            raise OutOfTime
        return scripted({"base": 10}, wall_s=50.0)(side, name, plan)

    paired = run_pairs(measure, Asked(budget_s=120.0), clock=lambda: 0.0)
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert paired.stopped == "the budget of 2 min was used up by 1 run"


def test_a_run_that_the_budgets_end_finds_far_too_long_leaves_no_verdict() -> None:
    """What the pairs before it say is not all that is to say: the head may hang."""
    now = [0.0]

    def measure(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        now[0] += 21.0 if plan.finds_warmup else 5.0
        if name == "head-11":
            raise OutOfTime
        uneven = 1.05 if side == HEAD and int(name[-2:]) % 2 else 0.98
        return scripted({"base": 100, "head": 100 * uneven})(side, name, plan)

    paired = run_pairs(measure, Asked(budget_s=200.0, steps=40), clock=lambda: now[0])
    assert len(paired.pairs) == 10
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert "head-11 had not ended after" in paired.judgement.reason


def test_the_rehearsals_do_not_say_for_how_long_a_run_must_have_time() -> None:
    """They are longer: with 1.2 s a step, seven pairs of shorter runs fit, which tell."""
    measure, clock, plans = in_simulated_time(1200, 1200)
    paired = run_pairs(measure, Asked(budget_s=1800.0), clock=clock)
    assert plans[2].steps < 200
    assert len(paired.pairs) >= 7
    assert paired.judgement.verdict is Verdict.PASS
    assert clock() <= 1800.0


def test_a_loss_that_may_be_chance_is_said_to_be_one() -> None:
    ratios = [0.999, 1.05, 1.04, 1.045, 1.05, 1.04, 1.045]
    pairs = []
    for number, ratio in enumerate(ratios):
        made = [
            scripted({"base": 10, "head": 10 * ratio})(side, name, RunPlan())
            for side, name in enumerate((f"base-{number}", f"head-{number}"))
        ]
        pairs.append(Pair(base=made[0], head=made[1], base_first=True))
    judgement = judge(pairs, Metric.STEP_MS, 0.03, last=True)
    assert judgement is not None
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.reason == "the loss is larger than allowed, but may be chance"


def test_too_short_a_run_stops_everything() -> None:
    measure = scripted({"base": 10, "head": 10}, steps=5)
    paired = run_pairs(measure, Asked())
    assert len(measure.plans) == 1
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert paired.stopped.startswith("base-00 had 35 steps")


def test_the_causes_of_noise_are_named_with_their_figures() -> None:
    busy = MachineState(load=9.0, cpus=2, foreign_cpus=1.5, stolen_cpus=0.3, throttled_share=0.4)
    runs = [replace(scripted({"base": 10})(0, "base-01", RunPlan()), machine=busy)]
    assert causes(runs) == (
        "other processes used 1.5 CPUs where 2 were ours to use",
        "the machine's host gave 0.30 CPUs to other guests (steal)",
        "the container's CPU quota was used up in 40 % of its periods",
    )
    assert causes([replace(runs[0], machine=MachineState(load=0.5, cpus=2, foreign_cpus=0.1))]) == ()


def test_runs_that_fetch_their_memory_anew_to_different_extents_are_told_how_to_be_alike() -> None:
    run = scripted({"base": 10})(0, "base-01", RunPlan())
    unlike = [
        replace(run, name=name, machine=MachineState(system_share=share, minor_faults_per_s=1e5))
        for name, share in (("base-01", 0.15), ("head-01", 0.4), ("base-02", 0.16), ("head-02", 0.41))
    ]
    assert causes(unlike) == (), "the head's own doing"
    mixed = [replace(each, name=f"base-{index}") for index, each in enumerate(unlike)]
    assert "gives more memory back" in causes(mixed)[0]
    assert "MALLOC_TRIM_THRESHOLD_" in advice(causes(mixed), Metric.STEP_MS, (), "")
    few = [replace(each, machine=replace(each.machine, minor_faults_per_s=10.0)) for each in mixed]
    assert causes(few) == ()


@pytest.mark.parametrize("ratio, within", [(1.0, "within"), (1.1, "beyond")])
def test_where_the_clock_cannot_tell_what_cpu_time_told_is_said(ratio: float, within: str) -> None:
    measure = scripted({"base": 10, "head": 10 * ratio})
    runs = [measure(side, name, RunPlan()) for side, name in enumerate(("base-01", "head-01"))]
    on_cpu = [replace(run, figures={Metric.CPU_MS: run.figures[Metric.STEP_MS]}) for run in runs]
    pairs = [Pair(base=on_cpu[0], head=on_cpu[1], base_first=True)] * 7
    told = judge(pairs, Metric.CPU_MS, 0.03, last=True)
    assert told is not None
    for stopped in ("", "the budget of 1 min was used up by 14 runs"):
        words = advice((), Metric.SAMPLES_PER_S, [told], stopped)
        assert f"the change is {within} the limit" in words and "--metric cpu_ms" in words
    assert "cpu_ms" not in advice((), Metric.PEAK_MEMORY, [told], "")


# -- worktrees


def test_worktrees_hold_the_commits_and_the_links(tmp_path: Path) -> None:
    hashes = [commit(repository(tmp_path / "repo"), text) for text in ("print(1)", "print(2)")]
    (tmp_path / "repo" / "data").mkdir()
    (tmp_path / "repo" / "data" / "big.bin").write_bytes(b"1")
    with worktrees(tmp_path / "repo", hashes, ("data",)) as roots:
        assert [(root / "train.py").read_text() for root in roots] == ["print(1)", "print(2)"]
        assert all((root / "data" / "big.bin").read_bytes() == b"1" for root in roots)
        assert len({len(str(root)) for root in roots}) == 1
    assert not any(root.exists() for root in roots)
    assert (tmp_path / "repo" / "data" / "big.bin").exists(), "a link is removed, not what it points to"


def test_a_repository_lies_at_a_path_of_any_bytes(tmp_path: Path) -> None:
    top = tmp_path / os.fsdecode(b"caf\xe9")
    commits = [commit(repository(top), "print(1)")]
    assert repository_of(top) == top
    with worktrees(repository_of(top), commits) as (root,):
        assert (root / "train.py").exists()
    (top / "train.py").write_text("print(2)")
    assert json.loads(json.dumps(uncommitted(top))).startswith("1 changed file ")


def test_three_dots_compare_with_the_point_where_the_branch_began(tmp_path: Path) -> None:
    repository(tmp_path, "print(1)")
    began = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "checkout", "--quiet", "-b", "topic")
    topic = commit(tmp_path, "print(2)")
    git(tmp_path, "checkout", "--quiet", "main")
    tip = commit(tmp_path, "print(3)")
    assert resolve_range(tmp_path, "main..topic") == (("main", tip), ("topic", topic))
    assert resolve_range(tmp_path, "main...topic") == (("main", began), ("topic", topic))
    assert parse_range("main..") == ("main", "HEAD")
    git(tmp_path, "clone", "--quiet", "--depth=1", "--no-single-branch", tmp_path.as_uri(), "shallow")
    for refused, dots in ((resolve_range, "..."), (row_of_commits, "..")):
        with pytest.raises(DiagnoseError, match=r"no commit in common .*\n.*git fetch --unshallow"):
            refused(tmp_path / "shallow", f"origin/main{dots}origin/topic")


def test_a_commit_that_looks_like_an_option_is_a_name(tmp_path: Path) -> None:
    repository(tmp_path, "print(1)")
    with pytest.raises(DiagnoseError, match="there is no commit '--upload-pack=x'"):
        resolve_range(tmp_path, "--upload-pack=x..HEAD")


def test_git_hears_the_users_settings_and_not_those_of_a_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`safe.directory` reaches git in a container by such variables."""
    repository(tmp_path, "print(1)")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "the hook's"))
    for name, value in (("COUNT", "1"), ("KEY_0", "user.name"), ("VALUE_0", "Ada of CI")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert own_git(tmp_path, "config", "user.name") == "Ada of CI"
    monkeypatch.setenv("GIT_SSH_COMMAND", "ssh -i key")
    assert own_git(tmp_path, "-c", "alias.asked=!echo $GIT_SSH_COMMAND $GIT_DIR", "asked") == "ssh -i key"


def test_a_clean_repository_has_nothing_uncommitted(tmp_path: Path) -> None:
    repository(tmp_path, "print(1)")
    (tmp_path / "new.txt").write_text("untracked")
    assert uncommitted(tmp_path) == ""
    (tmp_path / "train.py").write_text("print(2)")
    assert uncommitted(tmp_path).startswith("1 changed file ")


# -- instructions


def test_instructions_are_counted_where_perf_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "perf"
    fake.write_text(
        "#!/bin/sh\nout=/dev/stderr\n"
        'while [ $# -gt 0 ]; do case "$1" in\n'
        '-o) out="$2"; shift 2;; --|true) shift; break;; *) shift;; esac; done\n'
        '[ $# -eq 0 ] || "$@"\necho "123456,,instructions:u,99,100.00,," > "$out"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    instructions._perf.cache_clear()
    try:
        counts = tmp_path / "counts.txt"
        command = [*instructions.counting(counts), "touch", str(tmp_path / "made")]
        assert str(fake) in command
        subprocess.run(command, check=True, timeout=30)
        assert (tmp_path / "made").exists()
        assert instructions.count_of(counts) == 123456
        fake.write_text("#!/bin/sh\necho '<not supported>,,instructions:u,0,100.00,,' >&2\n")
        instructions._perf.cache_clear()
        assert instructions.counting(counts) == []
    finally:
        instructions._perf.cache_clear()
