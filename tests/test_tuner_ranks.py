"""Tuning a job of several ranks: they decide alike, and whatever happens to one never holds up another."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diagnose.launch.command import environment as recorded
from diagnose.launch.settings import Settings
from diagnose.store.reader import read_rank
from tests.running import DIAGNOSE, PLAIN, SCRIPTS, environment, free_port, run, run_ranks

SCRIPT = SCRIPTS / "tuned_ranks.py"
APPLY = '[[action]]\nname = "fused-optimizer"\n'
"""Put in force at once, then measured on against off. With momentum it is exact, and takes windows of five
steps."""

TOLD = ("tuning", "trial", "confirmation", "undone", "dropped", "frozen", "tuning_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the ranks of a job left.

    Attributes:
        codes: How each rank ended.
        lines: What each printed.
        events: What tuning told on each rank, as `(kind, detail)`.
    """

    codes: list[int]
    lines: list[str]
    events: list[list[tuple[str, dict[str, Any]]]]

    def told(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return [detail for each, detail in self.events[rank] if each == kind]

    @property
    def weights(self) -> list[str]:
        return [line.rpartition(" ")[2] for line in self.lines]


def start(
    folder: Path,
    apply: str,
    *,
    ranks: int = 2,
    only: Sequence[int] = (),
    port: str = "",
    steps: int = 260,
    patience_s: float = 30,
    wrong: str = "",
    allow: Sequence[str] = (),
    script: Path = SCRIPT,
) -> list[subprocess.Popen[str]]:
    """Starts every rank by hand, so that nobody ends one because another has died.

    Args:
        folder: Where to.
        apply: The settings to put in force; without any, the job is left alone.
        ranks: How many there are.
        only: Those to start; empty for all.
        port: Where they meet; empty for any.
        steps: Of training.
        patience_s: How long a rank is waited for.
        wrong: What goes wrong, as the script knows it.
        allow: Classes of actions.
        script: What trains.
    """
    folder.mkdir(exist_ok=True)
    place = environment(
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port or free_port(),
        OMP_NUM_THREADS="1",
        GOES_WRONG=wrong,
        DIAGNOSE_RANKS_WAIT_S=str(patience_s),
    )
    if apply:
        settings = folder / "apply.toml"
        settings.write_text(apply)
        place = recorded(place, Settings(apply=settings, allow=tuple(allow)), folder)
    return [
        subprocess.Popen(
            [*PLAIN, script, str(steps)],
            cwd=folder,
            env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in only or range(ranks)
    ]


def train(folder: Path, apply: str = APPLY, **options: Any) -> Job:
    """Runs a job to its end; the options are those of `start`."""
    processes = start(folder, apply, **options)
    try:
        printed = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Job(
        codes=[process.returncode for process in processes],
        lines=[stdout.strip() for stdout, _ in printed],
        events=[
            [(kind, detail) for _, _, kind, detail in read_rank(file).events if kind in TOLD]
            for file in sorted(folder.glob("rank*.sqlite"))
        ],
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same job, left alone."""
    return train(tmp_path_factory.mktemp("plain"), apply="")


def test_all_ranks_measure_the_same_and_train_what_they_train_alone(tmp_path, plain):
    job = train(tmp_path)
    assert (job.codes, job.lines) == (plain.codes, plain.lines)
    assert job.weights[0] == job.weights[1]
    assert [trial["outcome"] for trial in job.told("trial")] == ["kept"]
    assert job.told("confirmation")
    assert job.events[0] == job.events[1], "the slowest rank counts, on every rank"


@pytest.mark.extended
def test_four_ranks_do_so_too(tmp_path):
    job = train(tmp_path, ranks=4)
    assert job.codes == [0] * 4
    assert len(set(job.weights)) == 1
    assert job.told("confirmation")
    assert all(events == job.events[0] for events in job.events)


@pytest.mark.extended
def test_through_torchrun_the_report_tells_it_once(tmp_path, plain):
    (tmp_path / "apply.toml").write_text(APPLY)
    torchrun = ("--nproc-per-node", "2", "--master-port", free_port())
    ended = run(
        *DIAGNOSE, "--apply", "apply.toml", "--json", "report.json", *torchrun, SCRIPT, 260, cwd=tmp_path
    )
    assert (ended.code, sorted(ended.stdout.split("\n"))[1:]) == (0, plain.lines)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [trial["state"] for trial in report["trials"]] == ["kept"]
    assert report["tuning"]["frozen"] == ""


@pytest.mark.extended
def test_a_refusal_of_one_rank_refuses_for_all(tmp_path, plain):
    job = train(tmp_path, wrong="refuses")
    assert (job.codes, job.lines) == (plain.codes, plain.lines)
    for rank in (0, 1):
        (trial,) = job.told("trial", rank)
        assert (trial["outcome"], trial["reason"]) == ("refused", "rank 1: not on this machine")


@pytest.mark.extended
def test_averages_are_left_out_nowhere_if_ranks_have_different_numbers_of_batches(tmp_path):
    apply = '[[action]]\nname = "no-sync"\n'
    job = train(tmp_path, apply, script=SCRIPTS / "uneven_ranks.py", steps=60)
    assert job.codes == [0, 0]
    assert job.weights[0] == job.weights[1]
    for rank in (0, 1):
        (trial,) = job.told("trial", rank)
        assert trial["outcome"] == "refused"
        assert trial["reason"].startswith("ranks differ: rank 0: ") and "of 50 batches" in trial["reason"]


def test_an_exception_on_one_rank_undoes_everything_on_all(tmp_path, plain):
    job = train(tmp_path, wrong="raises")
    assert (job.codes, job.lines) == (plain.codes, plain.lines)
    for rank in (0, 1):
        (error,) = job.told("tuning_error", rank)
        assert error["error"].startswith("rank 1: ") and "not a fourth time" in error["error"]
        assert job.told("tuning", rank)[-1]["state"] == "ended"
        assert not job.told("frozen", rank)


@pytest.mark.extended
def test_a_loss_of_one_rank_that_is_no_number_undoes_on_all_what_may_harm(tmp_path):
    apply = '[[action]]\nname = "ddp-bf16-hook"\n'
    job = train(tmp_path, apply, allow=["precision"], wrong="spoils", steps=500)
    assert job.codes == [0, 0]
    for rank in (0, 1):
        (gone,) = job.told("dropped", rank)
        assert gone["action"] == "ddp-bf16-hook"
        assert "the loss is nan" in gone["reason"]
        assert not job.told("tuning_error", rank) and not job.told("frozen", rank)


@pytest.mark.extended
def test_a_rank_that_is_late_is_waited_for(tmp_path, plain):
    job = train(tmp_path, wrong="is late")
    assert (job.codes, job.lines) == (plain.codes, plain.lines)
    assert job.told("confirmation") == job.told("confirmation", 1) != []
    assert not job.told("frozen")


@pytest.mark.extended
def test_a_rank_that_is_too_late_leaves_all_as_they_are(tmp_path, plain):
    job = train(tmp_path, wrong="is late", patience_s=1)
    assert (job.codes, job.lines) == (plain.codes, plain.lines)
    frozen = [job.told("frozen", rank)[0] for rank in (0, 1)]
    assert frozen[0]["in_force"] == frozen[1]["in_force"]
    assert frozen[0]["reason"].startswith("the ranks did not meet for a window: Timed out waiting 1000ms")
    assert not job.told("tuning_error") and not job.told("tuning_error", 1)


@pytest.mark.extended
def test_of_four_ranks_one_that_is_too_late_leaves_all_as_they_are(tmp_path):
    job = train(tmp_path, ranks=4, wrong="is late", patience_s=1)
    assert job.codes == [0] * 4
    assert len(set(job.weights)) == 1
    frozen = [job.told("frozen", rank)[0] for rank in range(4)]
    assert all(each["in_force"] == frozen[0]["in_force"] for each in frozen)
    assert not any(job.told("tuning_error", rank) for rank in range(4))


@pytest.mark.extended
@pytest.mark.parametrize("wrong", ["dies", "dies at an exchange"])
def test_of_four_ranks_one_that_dies_ends_the_others(tmp_path, wrong):
    job = train(tmp_path, ranks=4, wrong=wrong, patience_s=300)  # `train` waits for less
    assert job.lines == ["rank 0 lost its peer", "killed", "rank 2 lost its peer", "rank 3 lost its peer"]
    assert job.codes[1] == -signal.SIGKILL
    assert {job.codes[rank] for rank in (0, 2, 3)} <= {7, -signal.SIGABRT}


@pytest.mark.extended
def test_ctrl_c_ends_a_rank_that_waits_for_another(tmp_path):
    waiting, late = start(tmp_path, APPLY, wrong="is very late")
    try:
        assert late.stderr is not None
        while late.stderr.readline() != "late\n":
            assert late.poll() is None
        time.sleep(1)  # the other comes to the exchange
        waiting.send_signal(signal.SIGINT)
        waiting.communicate(timeout=20)
        assert waiting.returncode == -signal.SIGINT
    finally:
        for process in (waiting, late):
            process.kill()
            process.communicate()


@pytest.mark.extended
def test_a_rank_that_leaves_the_loop_is_waited_for_once(tmp_path):
    job = train(tmp_path, wrong="leaves early", patience_s=2)
    assert job.codes == [0, 0]
    assert "did not meet" in job.told("frozen")[0]["reason"]


@pytest.mark.extended
def test_ranks_that_join_with_different_numbers_of_batches_are_left_alone(tmp_path):
    alone = train(tmp_path / "alone", "", wrong="joins")
    job = train(tmp_path / "tuned", wrong="joins")
    assert (job.codes, job.lines) == (alone.codes, alone.lines)
    for rank in (0, 1):
        (frozen,) = job.told("frozen", rank)
        assert frozen == {
            "reason": "the script joins ranks that have different numbers of batches",
            "in_force": [],
        }


@pytest.mark.extended
@pytest.mark.parametrize(
    "apply, wrong",
    [
        pytest.param("", "dies", marks=pytest.mark.extended),
        (APPLY, "dies"),
        pytest.param(APPLY, "dies at an exchange", marks=pytest.mark.extended),
    ],
)
def test_a_rank_that_dies_ends_the_others_as_it_does_without_us(tmp_path, apply, wrong):
    job = train(tmp_path, apply, wrong=wrong, patience_s=300)  # `train` waits for less
    assert job.lines == ["rank 0 lost its peer", "killed"]
    # Without us, too, a thread of torch's may abort the process when it ends.
    assert job.codes in ([7, -signal.SIGKILL], [-signal.SIGABRT, -signal.SIGKILL])
    if wrong == "dies at an exchange":
        assert "did not meet" in job.told("frozen")[0]["reason"]


@pytest.mark.extended
def test_a_job_of_which_only_some_ranks_are_tuned_goes_on(tmp_path, plain):
    port = free_port()
    (tuned,) = start(tmp_path, APPLY, ranks=2, only=(0,), port=port, patience_s=2)
    (other,) = start(tmp_path, "", ranks=2, only=(1,), port=port)
    printed = [process.communicate(timeout=90)[0].strip() for process in (tuned, other)]
    assert printed == plain.lines
    (frozen,) = [
        detail for _, _, kind, detail in read_rank(tmp_path / "rank0.sqlite").events if kind == "frozen"
    ]
    assert frozen["reason"] == "not every rank came within 2 s; do all run under diagnose?"


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks got."""
    folder = tmp_path_factory.mktemp("exchanges")
    ended = run_ranks("-m", "tests.scripts.exchanges", str(folder), num_ranks=3)
    return [json.loads(each.stdout) for each in ended]


@pytest.mark.extended
def test_every_rank_gets_every_value_in_the_order_of_ranks(exchanges):
    for number, rank in enumerate(exchanges):
        assert rank["values"]["rank"] == number
        assert rank["values"]["told"] == [
            [0, 1, 2],
            [{"a": [1.5, None, True]}] * 3,
            ["short", ["long" * 4000], "short"],
        ]
        assert rank["many"]["told"] == [[[0, n], [1, n], [2, n]] for n in range(200)]


@pytest.mark.extended
def test_ranks_that_decide_different_things_stop_deciding(exchanges):
    assert exchanges[0]["another plan"]["told"] == ["rank 1 was at that when rank 0 was at it"] * 2
    assert exchanges[1]["another step"]["told"] == ["rank 0 was at step 7 when rank 1 was at step 8"]


@pytest.mark.extended
def test_a_rank_that_leaves_says_why_and_keeps_nobody_waiting(exchanges):
    reason = "rank 1 takes no part any more: it has had enough"
    for rank in (0, 2):
        assert exchanges[rank]["leaves"]["told"][1:] == [reason, reason]
    assert exchanges[1]["leaves"]["told"][1:] == ["it has had enough"] * 2
    assert all(rank["leaves"]["took_s"] < 10 for rank in exchanges)


@pytest.mark.extended
def test_a_rank_is_waited_for_longer_where_one_was_late_before_and_where_an_epoch_begins(exchanges):
    for rank in exchanges:
        assert rank["late"]["told"] == [[1] * 3, [2] * 3]
        assert rank["late where an epoch begins"]["told"] == [[1] * 3]


@pytest.mark.extended
def test_the_end_of_the_group_is_told_before_it_is_gone(exchanges):
    assert exchanges[0]["values"]["ended"] == ["values"]
