"""Rules about the host where two of them see the same time, and the arithmetic that they share."""

from __future__ import annotations

import importlib
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diagnose.analysis.series import summarize_series
from diagnose.core.host import HostStats, PythonThread
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile, SourceLine
from diagnose.core.program import Loader, Program
from diagnose.core.series import Series
from diagnose.core.settings import Settings
from diagnose.rules._cpus import delayed_share, spread
from diagnose.rules._engine import rules
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from diagnose.rules._rank_examples import ranks_example
from diagnose.rules.frequent_evaluation import epoch_steps
from tests.findings import RULES, found_in

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
    before = set(threading.enumerate())
    exec(found.code, {**names, "state": state, "path": str(tmp_path / "state.pt")})
    for thread in set(threading.enumerate()) - before:
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
