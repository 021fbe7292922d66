"""Every rule: its examples, its page, and that each nanosecond has one cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diagnose.core.finding import Finding
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, Status
from diagnose.core.program import Loader, Program
from diagnose.core.series import Series
from diagnose.rules._engine import ask, built_in, diagnosed, ranked
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from diagnose.rules._rank_examples import meeting, ranks_example
from diagnose.rules._testing import check_rule, fires, has_its_readings, is_silent
from diagnose.rules.base import WORTH_SHARE, Rule

RULES = built_in()
FIRES = [
    pytest.param(name, p, id=f"{name}-{i}") for name, r in RULES.items() for i, p in enumerate(r.fires_on)
]
SILENT = [
    pytest.param(name, p, id=f"{name}-{i}") for name, r in RULES.items() for i, p in enumerate(r.silent_on)
]
MS = 1e6


# -- each rule by itself


@pytest.mark.parametrize(("name", "example"), FIRES)
def test_a_rule_fires_on_its_examples(name: str, example: Profile):
    fires(RULES[name], example)
    has_its_readings(RULES[name], example)


@pytest.mark.parametrize(("name", "example"), SILENT)
def test_a_rule_is_silent_where_its_fault_is_not(name: str, example: Profile):
    is_silent(RULES[name], example)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_documented_has_examples_and_names_only_what_exists(name: str):
    assert RULES[name].name == name
    check_rule(RULES[name], others=RULES)


def test_a_run_with_too_few_steps_is_not_judged():
    example = next(iter(RULES.values())).fires_on[0]
    assert diagnosed(example).findings
    few = replace(example.steps, count=6, warmup=1)
    for unjudged in (
        replace(example, status=Status.TOO_FEW_STEPS),
        replace(example, status=Status.SCRIPT_FAILED, steps=few),
    ):
        assert diagnosed(unjudged).findings == ()
        assert diagnosed(unjudged).num_rules is None


# -- all rules together


class Needy(Rule):
    needs = ("host.runnable_share",)

    def check(self, profile: Profile) -> Finding | None:
        raise AssertionError("asked without its reading")


def test_a_rule_whose_reading_is_missing_abstains_and_says_which():
    findings, abstained = ask({"needy": Needy()}, profile())
    assert findings == ()
    assert [(a.rule, a.missing) for a in abstained] == [("needy", "host.runnable_share")]


def finding(rule: str, **lost_ms: float) -> Finding:
    lost = {Phase(name): ms * MS for name, ms in lost_ms.items()}
    total = sum(lost.values())
    return Finding(
        rule=rule,
        summary=rule,
        lost_ns=lost,
        low_ns=0.5 * total,
        high_ns=1.5 * total,
        assumption="an example",
        evidence=("an example",),
        fix="nothing",
    )


def losses(found: list[Finding]) -> dict[str, float]:
    return {f.rule: round(f.lost_ns_per_step / MS, 6) for f in found}


def test_the_larger_of_two_findings_of_the_same_time_takes_it():
    run = profile(step_ms=100, data_wait_ms=40)
    found = ranked([finding("small", data_wait=15), finding("large", data_wait=30)], {}, run)
    assert losses(found) == {"large": 30, "small": 10}


def test_the_more_exact_rule_takes_the_time_first_and_a_shadow_is_dropped():
    run = profile(step_ms=100, data_wait_ms=40)
    pair = [finding("exact", data_wait=30), finding("vague", data_wait=40)]
    assert losses(ranked(pair, {"exact": ("vague",)}, run)) == {"exact": 30}
    assert losses(ranked(pair, {}, run)) == {"vague": 40}


def test_the_same_time_is_not_counted_again_because_its_phase_has_more():
    run = profile(step_ms=100, data_wait_ms=90)
    pair = [finding("exact", data_wait=30), finding("vague", data_wait=30)]
    assert losses(ranked(pair, {"exact": ("vague",)}, run)) == {"exact": 30}
    assert losses(ranked(pair, {"exact": ("vague",)}, run, residual=("vague",))) == {
        "exact": 30,
        "vague": 30,
    }


def test_findings_never_claim_more_than_a_phase_has():
    run = profile(step_ms=100, data_wait_ms=40)
    found = ranked(
        [finding("one", data_wait=40, other=5), finding("two", data_wait=39, backward=40)], {}, run
    )
    for phase, time_ns in run.phase_time_ns.items():
        assert sum(f.lost_ns.get(phase, 0) for f in found) <= time_ns * (1 + 1e-9)
    assert sum(f.lost_ns_per_step for f in found) <= run.step_time_ns


def test_what_is_not_worth_anybodys_time_is_left_out():
    run = profile(step_ms=100, gc_ms=2)
    tiny = 100 * WORTH_SHARE
    assert losses(ranked([finding("pause", gc=tiny * 0.99)], {}, run)) == {}
    assert losses(ranked([finding("pause", gc=tiny)], {}, run)) == {"pause": tiny}


def test_bounds_shrink_with_what_others_have_explained():
    run = profile(step_ms=100, data_wait_ms=30)
    found = ranked([finding("first", data_wait=20), finding("second", data_wait=15)], {}, run)
    second = found[1]
    assert (second.lost_ns_per_step, second.low_ns, second.high_ns) == pytest.approx((10e6, 5e6, 15e6))


def test_a_second_fault_is_no_shadow_of_the_one_that_explains_a_part_of_it():
    run = profile(step_ms=100, backward_ms=40)
    explains = {"growth": ("lines",)}
    both = ranked([finding("growth", backward=18), finding("lines", backward=30)], explains, run)
    assert losses(both) == {"growth": 18, "lines": 12}
    small = ranked([finding("growth", backward=11), finding("lines", backward=18)], explains, run)
    assert losses(small) == {"growth": 11}, "7 ms are what the two are wrong by"
    twice = [finding("first", backward=32), finding("same", backward=20)]
    assert losses(ranked(twice, {}, run)) == {"first": 32}, "two rules that blame the same time"
    run = profile(step_ms=100, data_wait_ms=40)
    waits = ranked([finding("growth", data_wait=18), finding("lines", data_wait=30)], explains, run)
    assert losses(waits) == {"growth": 18}, "a loader's wait has one name"


SAVES = {Phase.OTHER: 14.0, Phase.FORWARD: 26.0, Phase.BACKWARD: 60.0}
WAITS = {Phase.OTHER: 1.0, Phase.FORWARD: 26.0, Phase.BACKWARD: 60.0, Phase.COMMUNICATION: 13.0}
LOADS = InputStats(steady_wait_ns=30e6)
HELD_UP = Program(meetings=meeting(1, 14, last=0, held_ms=13))


@pytest.mark.parametrize(
    ("text", "idiom", "named"),
    [
        ('book.write(json.dumps(row) + "\\n")', "log", "logging-io"),
        ("hits += accuracy(out, y)", "metric", "slow-metrics"),
        ("average.mul_(decay).add_(p)", "ema", "slow-ema"),
        ("np.savez(path, **state)", "save", "checkpoint-stall"),
        ("order = sorted(rows, key=distance)", "python-loop", "compute-straggler"),
    ],
)
@pytest.mark.parametrize("share", [0.11, 0.139])
def test_what_the_first_rank_alone_does_is_named_by_its_line_where_that_has_a_purpose(
    text: str, idiom: str, named: str, share: float
):
    run = ranks_example(SAVES, WAITS, program=HELD_UP, where=(at(text, share, idiom),))
    findings, _ = ask(built_in(), run)
    assert [found.rule for found in findings] == [named]
    if named != "compute-straggler":
        assert "Rank 0 alone does this: that phase is far shorter on the others." in findings[0].evidence


def test_what_all_ranks_do_makes_none_of_them_late():
    late = {Phase.OTHER: 30.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 50.0}
    waits = {Phase.OTHER: 15.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 50.0, Phase.COMMUNICATION: 15.0}
    held_up = Program(meetings=meeting(1, 16, last=0, held_ms=15))
    run = ranks_example(late, waits, program=held_up, where=(at("print(row)", 0.14, "log"),))
    findings, _ = ask(built_in(), run)
    assert {found.rule for found in findings} == {"compute-straggler", "logging-io"}


def test_the_first_rank_that_waits_longer_for_its_input_is_named_before_what_its_loader_does():
    late = {Phase.DATA_WAIT: 30.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 50.0}
    held_up = {Phase.DATA_WAIT: 2.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 78.0}
    reads: dict[str, Any] = {
        "program": Program(loaders=(Loader(num_workers=0, batch_size=32),)),
        "input": LOADS,
    }
    findings, _ = ask(built_in(), ranks_example(late, held_up, **reads))
    assert [found.rule for found in findings] == ["input-straggler"]
    both = {Phase.DATA_WAIT: 26.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 54.0}
    findings, _ = ask(built_in(), ranks_example(late, both, **reads))
    assert findings[0].rule == "serial-loading", "each of them waits"


def test_growth_is_named_before_what_blames_the_whole_phase():
    growing = Series(drift_ns={Phase.DATA_WAIT: 36e6})
    line = at("rows = random.sample(list(memory), 64)", 0.29, phase=Phase.DATA_WAIT)
    findings, _ = ask(built_in(), profile(data_wait_ms=30, series=growing, where=(line,)))
    assert [found.rule for found in findings] == ["step-drift"]
    findings, _ = ask(built_in(), profile(data_wait_ms=30, where=(line,)))
    assert [found.rule for found in findings] == ["slow-batch-building"]


def test_a_limit_comes_before_what_the_script_does_wrong_only_if_it_costs_twice_as_much():
    run = profile(step_ms=100, communication_ms=40, other_ms=20)
    for waited, first in ((20, "fault"), (30, "limit")):
        pair = [finding("limit", communication=waited), finding("fault", other=12)]
        found = ranked(pair, {}, run, limits=("limit",))
        assert losses(found) == {"limit": waited, "fault": 12}
        assert found[0].rule == first
    assert {name for name, rule in RULES.items() if rule.is_limit} >= {"exposed-communication"}
