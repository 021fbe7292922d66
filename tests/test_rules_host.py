"""Rules about the host: on real runs with a fault in them, and where two rules see the same time."""

from __future__ import annotations

import importlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import DIAGNOSE, only_run, run, write

from diagnose.analysis.profile import load_profile, load_series
from diagnose.analysis.series import summarize_series
from diagnose.core.finding import Finding
from diagnose.core.host import HostStats, PythonThread
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile, SourceLine
from diagnose.core.program import Loader, Optimizer, Program
from diagnose.core.series import Series
from diagnose.core.settings import Settings
from diagnose.rules._cpus import delayed_share, spread
from diagnose.rules._engine import ask, rules
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from diagnose.rules._rank_examples import ranks_example
from diagnose.rules.frequent_evaluation import epoch_steps
from diagnose.rules.slow_clipping import CALL_NS, ELEMENT_NS, LEAST, SlowClipping

pytestmark = pytest.mark.alone

RULES = rules()

JOB = """
import json, sys, time
import torch
from torch import nn

fault = sys.argv[1]
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
spent = []


def clip(limit):
    for _ in range(60):
        total = 0.0
        for p in model.parameters():
            total += p.grad.norm().item() ** 2
        for p in model.parameters():
            p.grad.mul_(min(1.0, limit / (total**0.5 + 1e-6)))


for step in range(150):
    x = torch.randn(16, 32)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    begun = time.perf_counter()
    if fault == "clip":
        clip(1.0)
    clipped = time.perf_counter() - begun
    optimizer.step()
    begun = time.perf_counter()
    if fault == "sleep":
        time.sleep(0.01)
    elif fault == "busy":
        order = sorted(str(i) for i in range(20000))
    elif fault == "log":
        for _ in range(800):
            print(json.dumps({"step": step, "loss": 0.5}), file=sys.stderr, flush=True)
    elif fault == "save" and step % 10 == 9:
        for _ in range(40):
            torch.save(model.state_dict(), sys.argv[2] + "/model.pt")
    spent.append(clipped + time.perf_counter() - begun)
with open(sys.argv[2] + "/spent.json", "w") as file:
    json.dump(spent, file)
"""


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("sleep", "blocking-call"),
        ("busy", "python-overhead"),
        pytest.param("log", "logging-io", marks=pytest.mark.extended),
        pytest.param("clip", "slow-clipping", marks=pytest.mark.extended),
        ("save", "checkpoint-stall"),
    ],
)
def test_a_fault_in_a_real_run_is_named_with_its_line_and_its_size(fault: str, rule: str, tmp_path: Path):
    script = write(tmp_path / "train.py", JOB)
    ended = run(*DIAGNOSE, "--quiet", script, fault, tmp_path, cwd=tmp_path)
    assert ended.code == 0, ended.stderr[-2000:]
    seen = load_profile(only_run(tmp_path))
    findings = {finding.rule: finding for finding in ask(RULES, seen)[0]}
    assert rule in findings, list(findings)
    found = findings[rule]
    assert found.file == str(script)
    spent = json.loads((tmp_path / "spent.json").read_text())[seen.steps.warmup :]
    true_ns = 1e9 * sum(spent) / len(spent)
    assert found.lost_ns_per_step == pytest.approx(true_ns, rel=0.3)
    assert rule == next(iter(findings)), "the fault takes more than everything else"


SMALL_OPERATIONS = """
import torch
from torch import nn

torch.set_num_threads(2)
layers = [module for _ in range(24) for module in (nn.Linear(256, 256), nn.Tanh())]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(64, 256)
for step in range(150):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two threads want two CPUs")
def test_threads_that_sleep_between_operations_are_told_by_what_waking_them_costs(tmp_path: Path):
    script = write(tmp_path / "train.py", SMALL_OPERATIONS)
    quickest_ns = {}
    for policy in ("active", "passive"):
        folder = tmp_path / policy
        folder.mkdir()
        ended = run(*DIAGNOSE, "--quiet", script, cwd=folder, OMP_WAIT_POLICY=policy, GOMP_SPINCOUNT=None)
        assert ended.code == 0, ended.stderr[-2000:]
        seen = load_profile(only_run(folder))
        # What else runs here makes steps longer, and those whose threads stay awake by more.
        quickest_ns[policy] = float(np.quantile(load_series(only_run(folder)).step_time_ns, 0.05))
        if policy == "active" and (seen.foreign_cpus or 0.0) > 0.2:
            pytest.skip("what else runs here takes CPUs: threads that stay awake are no faster then")
        found = {finding.rule: finding for finding in ask(RULES, seen)[0]}.get("sleeping-threads")
        assert (found is not None) is (policy == "passive"), seen.host
    assert found is not None
    truth = 1 - quickest_ns["active"] / quickest_ns["passive"]
    low, high = (ns / seen.step_time_ns for ns in (found.low_ns, found.high_ns))
    assert low / 1.3 < truth < 1.3 * high


# -- two rules that see the same time


def found_in(example: Profile) -> dict[str, Finding]:
    return {finding.rule: finding for finding in ask(RULES, example)[0]}


BUSY_MACHINE = HostStats(
    cpus=2, machine_cpus=2, num_threads=1, process_cpus=0.6, runnable_share=0.4, busy_cpus=2.0,
    on_cpu_share=0.6, involuntary_per_s=100.0, voluntary_per_s=2.0,
)  # fmt: skip


def test_a_neighbour_does_not_take_the_time_of_a_line_that_is_to_blame():
    line = at("file.flush()", 0.3, "log")
    found = found_in(profile(other_ms=30, where=(line,), host=BUSY_MACHINE))
    assert found["logging-io"].lost_ns[Phase.OTHER] == pytest.approx(30e6)
    assert "noisy-neighbour" in found


def test_beside_a_neighbour_torch_is_to_have_the_threads_that_it_leaves_cpus_for():
    said = "While they run, 1 instead of 2 threads may help."
    alone = found_in(profile(host=BUSY_MACHINE))["noisy-neighbour"]
    team = replace(BUSY_MACHINE, num_threads=2, native_delay_share=0.4, process_cpus=0.9)
    teams = found_in(profile(host=team))["noisy-neighbour"]
    assert teams.fix.endswith(said)
    assert (teams.code, alone.code) == ("torch.set_num_threads(1)", "")
    assert found_in(profile(host=team, device="cuda"))["noisy-neighbour"].code == ""
    mild = replace(team, runnable_share=0.15, native_delay_share=0.15)
    assert found_in(profile(host=mild))["noisy-neighbour"].code == "", "the second thread wins more"
    eight = replace(team, machine_cpus=8, cpus=8, busy_cpus=3.0)
    assert found_in(profile(host=eight))["noisy-neighbour"].code == "", "two of eight have their CPUs"


def test_another_rank_of_the_run_is_no_neighbour():
    crowded = HostStats(
        cpus=2, machine_cpus=2, num_threads=1, process_cpus=0.8, runnable_share=0.2, busy_cpus=2.0
    )
    alone = replace(profile(host=crowded), settings=Settings(local_processes=2))
    assert "noisy-neighbour" not in found_in(alone), "what the other rank uses is not known"

    def with_rank(cpus: float, host: str) -> Profile:
        stats = replace(crowded, process_cpus=cpus)
        times = alone.phase_time_ns
        first = RankProfile(rank=0, host="here", phase_time_ns=times, stats=crowded)
        second = RankProfile(rank=1, host=host, phase_time_ns=times, stats=stats)
        return replace(alone, ranks=(first, second))

    assert "noisy-neighbour" not in found_in(with_rank(1.1, "here"))
    assert "noisy-neighbour" in found_in(with_rank(0.2, "here"))
    elsewhere = replace(with_rank(1.1, "there"), settings=Settings(local_processes=1))
    assert "noisy-neighbour" in found_in(elsewhere)


def test_too_many_threads_are_not_called_a_neighbour():
    host = replace(
        BUSY_MACHINE, num_threads=8, on_cpu_share=0.3, runnable_share=0.4, involuntary_per_s=3000.0
    )
    found = found_in(profile(host=host))
    assert "thread-oversubscription" in found
    assert "noisy-neighbour" not in found


def test_pinned_to_few_cpus_is_not_called_too_many_threads():
    host = replace(
        BUSY_MACHINE, cpus=1, machine_cpus=4, num_threads=4, busy_cpus=1.1, process_cpus=1.0,
        involuntary_per_s=3000.0,
    )  # fmt: skip
    found = found_in(profile(host=host))
    assert "cpu-affinity" in found
    assert "thread-oversubscription" not in found


@pytest.mark.parametrize(("cpuset", "pasted"), [(None, False), (1, False), (4, True)])
def test_a_binding_is_widened_by_a_line_only_where_the_machine_lets_it(cpuset: int | None, pasted: bool):
    rule = rules()["cpu-affinity"]
    bound = replace(rule.fires_on[0].host, cpuset_cpus=cpuset)
    found = rule.check(replace(rule.fires_on[0], host=bound))
    assert found is not None
    assert bool(found.code) == pasted
    assert ("ask the scheduler" in found.fix) != pasted


def test_cpus_behind_a_quota_are_not_free():
    host = HostStats(cpus=64, machine_cpus=64, busy_cpus=5.0, process_cpus=1.9, quota_cpus=2.5)
    assert (host.usable_cpus, host.whole_cpus) == (2.5, 2)
    assert host.free_cpus == pytest.approx(0.6)
    assert replace(host, quota_cpus=None).free_cpus == 59
    assert replace(host, cpus=None, quota_cpus=None).whole_cpus is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_to_be_pasted_saves_in_the_background_what_torch_can_load(device: str, tmp_path: Path):
    rule = rules()["checkpoint-stall"]
    found = rule.check(replace(rule.fires_on[0], run=replace(rule.fires_on[0].run, device=device)))
    assert found is not None
    state = {"model": {"weight": torch.ones(3)}, "step": 7}
    names = {
        name: importlib.import_module(name) for name in ("copy", "io", "pathlib", "threading", "torch")
    }
    exec(found.code, {**names, "state": state, "path": str(tmp_path / "state.pt")})
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(timeout=10)
    assert torch.load(tmp_path / "state.pt")["step"] == 7


def test_a_thread_that_loads_data_is_no_contention_for_the_lock():
    feeder = PythonThread(name="feeder", cpus=0.5)
    host = HostStats(on_cpu_share=0.5, runnable_share=0.0, voluntary_per_s=200.0, python_threads=(feeder,))
    workers = Program(loaders=(Loader(num_workers=2, batch_size=8),))
    assert "gil-contention" in found_in(profile(host=host))
    assert "gil-contention" not in found_in(profile(host=host, data_wait_ms=48, program=workers))


def test_pauses_of_a_step_that_is_recorded_are_not_called_jitter():
    rare = Series(spike_ns={Phase.FORWARD: 8e6}, spike_share={Phase.FORWARD: 0.02}, period={})
    quiet = HostStats(runnable_share=0.001, profiler_share=0.0)
    assert set(found_in(profile(series=rare, host=quiet))) == {"step-jitter"}
    recorded = replace(quiet, profiler_share=1.0)
    assert set(found_in(profile(series=rare, host=recorded))) == {"profiler-left-on"}


def test_a_profiler_that_records_shapes_costs_more_and_says_so():
    plain, _, recorded, *_ = RULES["profiler-left-on"].fires_on
    wide = [found_in(one)["profiler-left-on"] for one in (plain, recorded)]
    assert wide[1].lost_ns_per_step > 1.5 * wide[0].lost_ns_per_step
    assert "record_shapes" in " ".join(wide[1].evidence)
    assert "record_shapes" not in " ".join(wide[0].evidence)


def test_what_was_counted_in_a_part_of_the_steps_of_all_ranks_is_said_so():
    alike = {Phase.GC: 5.0, Phase.BACKWARD: 95.0}
    job = ranks_example(alike, alike, events={"gc": 30})
    job = replace(job, steps=replace(job.steps, count=5000, left_out=4850))
    assert "30 full collections in 150 steps on 2 ranks." in found_in(job)["gc-pauses"].evidence


def test_more_threads_are_a_trial_and_no_promise():
    rule = RULES["too-few-threads"]
    found = found_in(rule.fires_on[0])["too-few-threads"]
    assert found.gain(rule.fires_on[0].step_time_ns).low == 1.0
    assert "only a trial tells" in found.fix


def test_a_line_of_the_evaluation_or_of_a_worker_is_not_the_loops():
    lines = (
        at("print(score)", 0.1, "log", phase=Phase.EVALUATION),
        at("print(row)", 0.2, "log", in_worker=True),
    )
    assert "logging-io" not in found_in(profile(evaluation_ms=9, where=lines))


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [
        (at("hits += accuracy(out, y)", 0.3, "metric"), at("values = out.tolist()", 0.1, "sync")),
        (at("hits += accuracy(out, y)", 0.3, "metric"), at("weights = [f(i) for i in order]", 0.1)),
        (at("pickle.dump(state, file)", 0.3, "save"), at("print(step, loss)", 0.1, "log")),
    ],
)
def test_lines_of_two_kinds_are_two_faults(larger: SourceLine, smaller: SourceLine):
    found = found_in(profile(other_ms=45, where=(larger, smaller)))
    assert [round(finding.lost_ns_per_step / 1e6) for finding in found.values()] == [30, 10]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_host_lost_need_not_be_won_on_an_accelerator(device: str):
    line = at("weights = [f(i) for i in order]", 0.3, "python-loop")
    line_of_code = found_in(profile(other_ms=45, where=(line,), device=device))["python-overhead"]
    neighbour = found_in(profile(host=BUSY_MACHINE, device=device))["noisy-neighbour"]
    for finding in (line_of_code, neighbour):
        assert (finding.low_ns > 0) is (device == "cpu"), finding.rule
        assert ("queued meanwhile" in finding.assumption) is (device == "cuda")


def test_the_machines_readings_are_evidence_where_they_say_something():
    said = "One CPU was busy all the time, the other 7 were not: one thread computed at a time."
    line = at("weights = [f(i) for i in order]", 0.1, "python-loop")
    for full, is_said in ((1.0, True), (0.3, False), (6.5, False), (None, False)):
        host = HostStats(cpus=8, machine_cpus=8, full_cores=full)
        found = found_in(profile(other_ms=12, where=(line,), host=host))["python-overhead"]
        assert (said in found.evidence) == is_said, full
    writing = HostStats(machine_cpus=8, iowait_cpus=1.2, written_bytes_per_s=50 * 2.0**20)
    found = found_in(profile(checkpoint_ms=15.5, host=writing))["checkpoint-stall"]
    assert found.evidence[-2:] == (
        "1.2 of 8 CPUs of the machine stood idle while a process waited for a disk.",
        "This process wrote 50.0 MiB/s, beyond the page cache.",
    )
    quiet = HostStats(machine_cpus=8, iowait_cpus=0.01, written_bytes_per_s=5000.0)
    assert len(found_in(profile(checkpoint_ms=15.5, host=quiet))["checkpoint-stall"].evidence) == 1


@pytest.mark.parametrize("name", ["slow-storage", "serial-loading", "cache-thrash", "memory-pressure"])
def test_waits_for_a_disk_are_evidence_of_what_waits_for_it(name: str):
    rule = RULES[name]
    example = rule.fires_on[0]
    waits = "0.5 of 4 CPUs of the machine stood idle while a process waited for a disk."
    told = {"machine_cpus": 4, "iowait_cpus": 0.5}
    if name == "serial-loading":  # only where the loop stands off the CPU meanwhile
        told |= {"on_cpu_share": 0.5, "runnable_share": 0.0}
        example = replace(example, run=replace(example.run, device="cpu"))
    found = rule.check(replace(example, host=replace(example.host, **told)))
    assert found is not None and waits in found.evidence
    assert waits not in getattr(rule.check(example), "evidence", ())


def test_loading_is_not_said_to_wait_for_no_disk_where_a_disk_keeps_cpus_idle():
    """Half the time it computes: an example of a run that writes and syncs 100 MiB a second."""
    rule = RULES["serial-loading"]
    example = rule.fires_on[0]
    example = replace(example, run=replace(example.run, device="cpu"))
    for iowait, said in ((0.01, True), (0.23, False)):
        host = replace(example.host, on_cpu_share=0.9, runnable_share=0.0, iowait_cpus=iowait)
        found = rule.check(replace(example, host=host))
        assert found is not None
        assert any("does not wait for a disk" in each for each in found.evidence) == said


def test_a_scripts_own_collections_are_blamed_on_their_line():
    line = at("gc.collect()", 0.2, "collect", phase=Phase.GC)
    found = found_in(profile(gc_ms=20, where=(line,)))["gc-pauses"]
    assert (found.line, found.actions) == (41, ())


def test_a_checkpoint_says_how_often_it_comes():
    every_20 = Series(
        spike_ns={Phase.CHECKPOINT: 15.5e6},
        spike_share={Phase.CHECKPOINT: 0.05},
        period={Phase.CHECKPOINT: 20},
    )
    found = found_in(profile(checkpoint_ms=15.5, series=every_20))["checkpoint-stall"]
    assert found.summary == "Saving takes 16 % of the time, every 20 steps for 310 ms"
    assert "every 200 steps instead of 20" in found.fix


def test_evaluation_is_blamed_on_its_own_function_and_comes_once_an_epoch_at_least():
    program = Program(loaders=(Loader(num_workers=0, batch_size=10, dataset_length=1000, epochs=5),))
    every_20 = Series(spike_share={Phase.EVALUATION: 0.05}, period={Phase.EVALUATION: 20},
                      spike_ns={Phase.EVALUATION: 20e6})  # fmt: skip
    where = (
        replace(at("return self.net(x)", 0.3, phase=Phase.FORWARD), function="Net.forward"),
        replace(at("return self.net(x)", 0.15, phase=Phase.EVALUATION), function="Net.forward"),
        replace(at("right += model(x)", 0.05, phase=Phase.EVALUATION), function="evaluate", line=77),
        replace(at("model.eval()", 0.01), function="evaluate", line=75),
        replace(at("if dry_run:", 0.002, phase=Phase.EVALUATION), function="main", line=99),
    )
    found = found_in(profile(evaluation_ms=20, series=every_20, program=program, where=where))
    finding = found["frequent-evaluation"]
    assert finding.line == 77
    assert finding.fix == "Evaluate every 100 steps instead of every 20, or on fewer samples."
    assert finding.fix_won_ns == pytest.approx(0.8 * finding.lost_ns_per_step)
    endless = profile(evaluation_ms=20, series=every_20)
    assert "every 200 steps" in found_in(endless)["frequent-evaluation"].fix


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


@pytest.mark.parametrize("warmup", [0, 20, 100])
def test_what_grows_is_counted_from_the_first_step_of_the_run(warmup: int):
    grown_ns = 0.1e6 * np.arange(300)[warmup:]
    times = {Phase.OTHER: grown_ns, Phase.FORWARD: np.full(len(grown_ns), 30e6)}
    mean = {phase: float(ns.mean()) for phase, ns in times.items()}
    example = profile(
        step_ms=sum(mean.values()) / 1e6, steps=len(grown_ns), other_ms=mean[Phase.OTHER] / 1e6
    )
    steps = replace(example.steps, count=300, warmup=warmup)
    example = replace(example, steps=steps, series=summarize_series(times))
    finding = found_in(example)["step-drift"]
    assert finding.lost_ns_per_step == pytest.approx(mean[Phase.OTHER], rel=0.12)


# -- the arithmetic they share


def test_an_epoch_is_as_long_as_the_loader_says():
    assert epoch_steps(profile()) is None
    loader = Loader(num_workers=0, batch_size=10, dataset_length=1000)
    assert epoch_steps(profile(program=Program(loaders=(loader,)))) == 100
    twice = replace(loader, epochs=2)
    assert epoch_steps(profile(steps=399, program=Program(loaders=(twice,)))) == 200


def test_the_delays_of_a_team_come_on_top_of_the_training_threads():
    host = HostStats(num_threads=2, runnable_share=0.3, native_delay_share=0.3)
    assert delayed_share(host) == pytest.approx(0.6)
    assert delayed_share(replace(host, num_threads=4)) == pytest.approx(0.4)
    assert delayed_share(replace(host, num_threads=1)) == pytest.approx(0.3)


def test_a_spread_share_never_takes_a_whole_phase():
    example = profile(data_wait_ms=40)
    lost = spread(example, 0.99)
    assert all(ns <= 0.9 * example.phase_time_ns[phase] * (1 + 1e-9) for phase, ns in lost.items())
    assert sum(spread(example, 0.5).values()) == pytest.approx(50e6)
