"""Every rule: its examples, its page, and that each nanosecond has one cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, Status
from diagnose.rules._engine import WORTH_SHARE, ask, built_in, diagnosed, ranked
from diagnose.rules._examples import profile
from diagnose.rules._testing import check_rule, fires, has_its_readings, is_silent
from diagnose.rules.base import Rule

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
