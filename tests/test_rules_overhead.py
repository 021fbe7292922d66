"""Which rule tells a part of the loop's own code: acting, long steps, updates by hand or overhead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import SourceLine
from diagnose.core.program import Optimizer, Program
from diagnose.core.series import Series
from diagnose.rules._engine import ask
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from diagnose.rules.slow_clipping import CALL_NS, ELEMENT_NS, LEAST, SlowClipping
from tests.findings import RULES, found_in


def test_all_that_acting_takes_is_lost_and_the_fix_is_promised_half_of_it():
    (example, *_) = RULES["slow-rollout"].fires_on
    found = found_in(example)
    assert set(found) == {"slow-rollout"}
    acts = found["slow-rollout"]
    assert acts.lost_ns == pytest.approx({Phase.EVALUATION: 60e6})
    assert acts.fixed_ns_per_step == pytest.approx(30e6)


STEPS_ENVIRONMENT = at("obs, reward, done = env.step(a)", 0.3, "environment")


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("python-overhead", at("weights = [f(i) for i in order]", 0.2, "python-loop")),
        ("slow-batch-building", at("x = [f(c) for c in row]", 0.2, "python-loop", phase=Phase.DATA_WAIT)),
        ("frequent-evaluation", at("right += score(batch)", 0.2, phase=Phase.EVALUATION)),
    ],
)
def test_what_a_loop_does_beside_acting_is_told_whole(rule: str, line: SourceLine):
    acts = replace(STEPS_ENVIRONMENT, phase=line.phase)
    part: dict[str, Any] = {f"{line.phase.value}_ms": 50}
    found = found_in(profile(**part, where=(acts, line)))
    assert set(found) == {"slow-rollout", rule}
    assert found["slow-rollout"].lost_ns_per_step == pytest.approx(30e6)
    assert found[rule].lost_ns_per_step == pytest.approx(20e6)
    part = {f"{line.phase.value}_ms": 30}
    assert set(found_in(profile(**part, where=(acts,)))) == {"slow-rollout"}


def test_of_a_helper_that_the_environment_calls_too_only_the_rest_is_overhead():
    helper = at("seen = observe(place)", 0.15)
    for acting, rest_ms in ((0.13, 0), (0.05, 10)):
        where = (STEPS_ENVIRONMENT, replace(helper, acting=acting))
        found = found_in(profile(other_ms=46, where=where))
        assert found["slow-rollout"].lost_ns_per_step == pytest.approx((0.3 + acting) * 100e6)
        lost_ns = found["python-overhead"].lost_ns_per_step if "python-overhead" in found else 0.0
        assert lost_ns == pytest.approx(rest_ms * 1e6)


def test_a_fault_of_the_script_comes_before_acting_that_costs_less_than_twice_as_much():
    for acting, first in ((0.35, "logging-io"), (0.45, "slow-rollout")):
        where = (replace(STEPS_ENVIRONMENT, share=acting), at("print(row, file=log)", 0.2, "log"))
        found, _ = ask(RULES, profile(other_ms=70, where=where))
        assert found[0].rule == first


def test_a_policy_that_acts_with_gradients_is_to_compute_an_episode_in_one_call():
    example = RULES["small-operators"].fires_on[0]
    acts = at("action = dist.sample()", 0.05, "rollout", phase=Phase.DATA_WAIT)
    found = found_in(replace(example, where=(acts,)))["small-operators"]
    assert (found.fix.startswith("Choose the actions without gradients"), found.code) == (True, "")
    assert found_in(example)["small-operators"].code


@pytest.mark.parametrize(
    ("function", "compiled"), [("rk4", "rk4"), ("Field.forward", "model"), ("main", "model")]
)
def test_what_has_the_loop_over_a_small_model_is_to_be_compiled_with_it(function: str, compiled: str):
    example = RULES["small-operators"].fires_on[0]
    turn = at("d = f(y + h * c)", 0.01, "python-loop", phase=Phase.FORWARD)
    trains = at("loss.backward()", 0.4, phase=Phase.BACKWARD)
    found = found_in(replace(example, where=(replace(turn, function=function), trains)))
    assert found["small-operators"].code == f"{compiled} = torch.compile({compiled})"


def test_a_line_that_few_steps_run_is_jitter_and_what_each_step_does_beside_it_is_overhead():
    example = RULES["step-jitter"].fires_on[-1]
    found = found_in(example)
    assert set(found) == {"step-jitter"}
    (settles,) = example.where
    jitter = found["step-jitter"]
    assert (jitter.file, jitter.line) == (settles.file, settles.line)
    assert jitter.lost_ns == pytest.approx({Phase.OTHER: 17e6})
    assert settles.text in jitter.fix
    assert not any("in other," in each for each in jitter.evidence)
    books = replace(at("book.update(batch)", 0.2), line=50)
    both = replace(profile(other_ms=40), series=example.series, host=example.host, where=(settles, books))
    found = found_in(both)
    assert set(found) == {"step-jitter", "python-overhead"}
    assert found["python-overhead"].line == 50
    assert found["python-overhead"].lost_ns_per_step == pytest.approx(21e6)
    assert found["step-jitter"].lost_ns_per_step == pytest.approx(17e6)
    regular = replace(both, series=replace(example.series, period={Phase.OTHER: 10}))
    assert found_in(regular)["python-overhead"].lost_ns_per_step == pytest.approx(38e6)


@pytest.mark.parametrize(
    ("forward_ns", "jitter", "overhead"),
    [(8e6, {Phase.OTHER: 17e6}, {}), (20e6, {Phase.FORWARD: 20e6}, {Phase.OTHER: 18e6})],
)
def test_long_steps_of_a_line_are_told_alone_or_left_to_overhead(forward_ns, jitter, overhead):
    example = RULES["step-jitter"].fires_on[-1]
    series = example.series
    series = replace(
        series,
        spike_ns={**series.spike_ns, Phase.FORWARD: forward_ns},
        spike_share={**series.spike_share, Phase.FORWARD: 0.05},
    )
    found = found_in(replace(example, series=series))
    assert set(found) == {"step-jitter"} | ({"python-overhead"} if overhead else set())
    assert found["step-jitter"].lost_ns == pytest.approx(jitter)
    assert bool(found["step-jitter"].file) is (Phase.OTHER in jitter)
    assert not overhead or found["python-overhead"].lost_ns == pytest.approx(overhead)


def test_what_step_jitter_cannot_tell_remains_overhead():
    example = RULES["step-jitter"].fires_on[-1]
    found = found_in(replace(example, host=HostStats()))
    assert set(found) == {"python-overhead"}
    assert found["python-overhead"].lost_ns == pytest.approx({Phase.OTHER: 18e6})
    hook = at("norms = spectra(p)", 0.1, "hook", phase=Phase.OPTIMIZER)
    beside = profile(other_ms=20, optimizer_ms=30, series=example.series, host=example.host)
    found = found_in(replace(beside, where=(*example.where, replace(hook, irregular=0.09))))
    assert set(found) == {"step-jitter", "python-overhead"}
    assert found["python-overhead"].lost_ns == pytest.approx({Phase.OPTIMIZER: 10e6, Phase.OTHER: 1e6})


@pytest.mark.parametrize(
    ("share", "jitter", "overhead"), [(0.2, {Phase.OTHER: 9e6}, {}), (0.3, {}, {Phase.OTHER: 20e6})]
)
def test_of_a_helper_that_acting_calls_too_each_part_is_told_once(share, jitter, overhead):
    helper = replace(at("seen = observe(place)", share), acting=0.1, irregular=0.09)
    example = RULES["step-jitter"].fires_on[-1]
    found = found_in(
        profile(other_ms=70, series=example.series, host=example.host, where=(STEPS_ENVIRONMENT, helper))
    )
    assert found.pop("slow-rollout").lost_ns == pytest.approx({Phase.OTHER: 40e6})
    told = {rule: finding.lost_ns for rule, finding in found.items()}
    assert told.get("step-jitter", {}) == pytest.approx(jitter)
    assert told.get("python-overhead", {}) == pytest.approx(overhead)


def test_a_copy_of_the_model_in_each_step_is_to_be_made_once():
    line = at("current = copy.deepcopy(model)", 0.14)
    found = found_in(profile(other_ms=15, where=(line,)))["python-overhead"]
    assert found.fix.startswith("Make the copy once")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("owner = next(o for o in owners if o.low <= i < o.high)", True),
        ("place = next((i for i, p in enumerate(places) if p > x), len(places))", True),
        ("x, y = next(batches)", False),
        ("x, y = next(iter(loader))", False),
        ("rows = [next(batches) for _ in range(4)]", False),
        ("rows = [next(iter(loader)) for loader in loaders]", False),
    ],
)
def test_what_looks_for_something_with_next_asks_for_no_batch(text: str, is_one: bool):
    assert ("python-overhead" in found_in(profile(other_ms=12, where=(at(text, 0.1),)))) is is_one


def test_a_packages_fit_that_trains_no_network_is_the_loops_own_code():
    line = at("forest.fit(rows, y)", 0.1)
    for via, is_one in (
        ("sklearn/tree/_classes.py:472 Tree._fit", True),
        ("skorch/net.py:9 Net.fit", False),
    ):
        found = found_in(profile(other_ms=12, where=(replace(line, via=via),)))
        assert ("python-overhead" in found) is is_one


def test_what_a_hook_of_a_module_notes_is_the_loops_own_code():
    line = at("seen.append(output.std().item())", 0.1, phase=Phase.FORWARD)
    assert "python-overhead" not in found_in(profile(forward_ms=40, where=(line,)))
    found = found_in(profile(forward_ms=40, where=(replace(line, idiom=("hook",)),)))["python-overhead"]
    assert found.lost_ns == pytest.approx({Phase.FORWARD: 10e6})


@pytest.mark.parametrize("name", ["metric", "ema"])
def test_a_line_that_waits_is_not_blamed_for_what_it_waits_for(name: str):
    waits, beside = at("sock.recv(2)", 0.1, name, "wait"), replace(at("f(x)", 0.15, name), line=9)
    found = found_in(profile(other_ms=30, where=(beside, waits)))
    assert found["blocking-call"].lost_ns == pytest.approx({Phase.OTHER: 10e6})
    assert found["slow-metrics" if name == "metric" else "slow-ema"].line == 9


@pytest.mark.parametrize(
    ("growing", "named"),
    [
        (at("np.save('losses.npy', np.array(losses))", 0.19, "save"), {"step-drift"}),
        (at("mean = sum(losses) / len(losses)", 0.19, "python-loop"), {"step-drift", "checkpoint-stall"}),
    ],
)
def test_growth_explains_a_save_only_where_what_is_saved_grows(growing: SourceLine, named: set[str]):
    saves = replace(at("pickle.dump(state, file)", 0.18, "save"), line=9)
    where = (growing,) if "save" in growing.idiom else (growing, saves)
    found = found_in(profile(other_ms=40, series=Series(drift_ns={Phase.OTHER: 25e6}), where=where))
    assert set(found) == named


def test_growth_explains_an_optimizer_only_of_the_scripts_own():
    torchs, own = (RULES["slow-optimizer"].fires_on[at] for at in (0, 3))
    growing = Series(drift_ns={Phase.OPTIMIZER: 15e6})
    assert set(found_in(replace(own, series=growing))) == {"step-drift"}
    assert set(found_in(replace(torchs, series=growing))) == {"step-drift", "slow-optimizer"}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("total += p.grad.norm().item() ** 2", 'clip_grad_norm_(model.parameters(), float("inf")'),
        ("p.grad.clamp_(-1, 1)", "clip_grad_value_("),
    ],
)
def test_what_replaces_a_loop_over_gradients_clips_as_that_did_or_not_at_all(text: str, code: str):
    finding = SlowClipping().check(profile(other_ms=12, where=(at(text, 0.1, "clip"),)))
    assert finding is not None and code in finding.code


def test_of_a_loop_over_gradients_what_one_call_takes_for_them_is_not_won():
    def won_ms(num_tensors: int, num_elements: int, every: str = "", **facts: Any) -> float:
        made = Optimizer(kind="AdamW", num_tensors=num_tensors, num_elements=num_elements)
        line = replace(at("total += p.grad.norm().item() ** 2", 0.1, "clip", "sync"), every=every)
        program = Program(optimizers=(made,) if num_tensors else ())
        finding = SlowClipping().check(profile(other_ms=12, where=(line,), program=program, **facts))
        assert finding is not None and "10.0 ms" in finding.summary
        return finding.lost_ns_per_step / 1e6

    whole = pytest.approx(10)
    assert won_ms(0, 0) == whole, "no optimizer is known"
    assert won_ms(400, 400_000) == pytest.approx(10 - (400 * CALL_NS + 400_000 * ELEMENT_NS) / 1e6)
    assert won_ms(400, 400_000_000) == pytest.approx(10 * LEAST)
    assert won_ms(400, 400_000, every="step % 50 == 0") == whole, "how often is not known"
    assert won_ms(400, 400_000, device="cuda") == whole, "a few launches"


@pytest.mark.parametrize(
    ("every", "code"),
    [
        ("", "if step % 100 == 0: ..."),
        ("step % 20 == 0", "if step % 200 == 0: ..."),
        ("step % args.log_every == 0", ""),
    ],
)
@pytest.mark.parametrize(("rule", "idiom"), [("logging-io", "log"), ("slow-metrics", "metric")])
def test_what_is_done_only_every_so_many_steps_is_to_be_done_more_rarely(rule, idiom, every, code):
    line = replace(at("report(row)", 0.1, idiom), every=every)
    finding = found_in(profile(other_ms=12, where=(line,)))[rule]
    assert finding.code == code
    assert f"`{every}`" in finding.fix or not every


@pytest.mark.parametrize(
    ("text", "via", "fix"),
    [
        ("average.lerp_(p, 0.001)", "", "Replace the loop"),
        ("torch._foreach_lerp_(averages, weights, 0.001)", "", "Average every few steps"),
        ("task.update_ema(step=step)", "timm/task/base.py:90 update_ema", "Average every few steps"),
    ],
)
def test_an_average_that_is_one_call_already_is_to_be_updated_more_rarely(text: str, via: str, fix: str):
    line = replace(at(text, 0.1, "ema"), via=via)
    assert found_in(profile(other_ms=12, where=(line,)))["slow-ema"].fix.startswith(fix)


def test_an_update_tensor_by_tensor_in_the_loop_is_a_slow_optimizer_and_no_overhead():
    update = at("p.data.add_(p.grad, alpha=-lr)", 0.1, "update")
    found = found_in(profile(other_ms=12, where=(update,)))
    assert set(found) == {"slow-optimizer"}
    assert found["slow-optimizer"].fix.startswith("Update all tensors in one call, torch._foreach_add_(")
    other = at("p.data.add_(p.grad, alpha=-lr)", 0.1, "python-loop")
    assert set(found_in(profile(other_ms=12, where=(other,)))) == {"python-overhead"}


def test_a_loop_over_the_weights_beside_a_slow_optimizer_is_told_with_it():
    update = at("p.data.add_(p.grad, alpha=-lr)", 0.1, "update")
    slow = RULES["slow-optimizer"].fires_on[0]
    example = profile(other_ms=12, optimizer_ms=30, program=slow.program)
    alone = found_in(example)["slow-optimizer"]
    both = found_in(replace(example, where=(update,)))["slow-optimizer"]
    assert both.lost_ns[Phase.OPTIMIZER] == alone.lost_ns[Phase.OPTIMIZER]
    assert both.lost_ns[Phase.OTHER] == pytest.approx(0.4 * 10e6)
    assert "AdamW updates 400 tensors" in both.summary and "The loop updates the weights" in both.summary


def test_optimizers_of_one_tensor_each_are_to_become_one():
    (example,) = (each for each in RULES["slow-optimizer"].fires_on if len(each.program.optimizers) > 1)
    made = tuple(replace(each, file="/home/me/train.py", line=7) for each in example.program.optimizers)
    found = found_in(replace(example, program=replace(example.program, optimizers=made)))["slow-optimizer"]
    assert found.summary == "AdamW updates 60 tensors one by one."
    assert found.fix == "Make one AdamW of all these tensors, with fused=True."


def test_what_a_line_takes_in_usual_steps_is_batch_building_though_most_of_it_passes_in_long_ones():
    line = at("rows = [near(node) for node in nodes]", 0.38, "python-loop", phase=Phase.DATA_WAIT)
    long = Series(spike_ns={Phase.DATA_WAIT: 22e6}, spike_share={Phase.DATA_WAIT: 0.2}, period={})
    host = HostStats(runnable_share=0.001)
    found = found_in(
        profile(data_wait_ms=40, series=long, host=host, where=(replace(line, irregular=0.22),))
    )
    assert found["step-jitter"].lost_ns_per_step == pytest.approx(22e6)
    assert found["slow-batch-building"].lost_ns_per_step == pytest.approx(18e6)


def test_of_tensors_in_many_groups_and_others_one_by_one_those_are_told_that_cost_more():
    one_by_one = Optimizer(
        kind="AdamW", num_tensors=400, num_elements=400_000, implementation="for-loop", can_fuse=True
    )
    in_groups = replace(one_by_one, num_elements=6_000, implementation="foreach")
    for grouped, told in ((60, "400 tensors"), (600, "600 tensors in 600 groups")):
        groups = replace(in_groups, num_tensors=grouped, num_groups=grouped)
        found = found_in(profile(optimizer_ms=60, program=Program(optimizers=(one_by_one, groups))))
        assert f"updates {told}" in found["slow-optimizer"].summary
