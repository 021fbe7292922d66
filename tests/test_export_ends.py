"""How the end of a run is told to other tools: its status, its last figures, and when they are of."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diagnose.export._follower import Follower
from diagnose.export._live import SILENT_S, _goes_on, export_once
from diagnose.export.base import Destination
from diagnose.export.mlflow import Mlflow
from diagnose.export.perfetto import trace_of
from diagnose.export.tensorboard import Tensorboard
from diagnose.export.wandb import Wandb
from tests.recorded import manifest, record, writer

BEGUN_UNIX = 1_700_000_000
ANCHOR_NS = [0, BEGUN_UNIX * 10**9]


def failed_run(folder: Path) -> Path:
    record(manifest(folder, exit_code=1), 40, anchor_ns=ANCHOR_NS)
    return folder


class Begun:
    """A run of Weights & Biases, as far as it is used: the library is not installed for the tests."""

    def __init__(self) -> None:
        self.dir, self.offline = "wandb/run", True
        self.summary: dict[str, Any] = {}
        self.axes: dict[str, str] = {}
        self.logged: list[dict[str, float]] = []
        self.exit_code: int | None = None
        self.config = SimpleNamespace(update=lambda values, allow_val_change: None)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_wandb_begins_a_run_of_its_own_and_ends_it_as_the_script_ended(tmp_path, monkeypatch):
    begun, seen = Begun(), {}

    def init(**options: Any) -> Begun:
        seen.update({name: os.environ[name] for name in os.environ if name.startswith("WANDB_")})
        return begun

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "the-scripts-own")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    follower = Follower(failed_run(tmp_path / "run"))
    reading = follower.look(is_last=False)
    with Wandb().open("project", reading.profile.run) as write:
        write(reading)
        record(tmp_path / "run", 20, restart=1)
        write(follower.look(is_last=True))
    assert seen == {"WANDB_ENTITY": "team"}
    assert begun.axes == {"diagnose/*": "diagnose/step"}
    assert [each["diagnose/step"] for each in begun.logged] == [*range(40), *range(20)]
    assert begun.exit_code == 1 and "diagnose/report" in begun.summary


@pytest.mark.parametrize(("exit_code", "status"), [(0, "FINISHED"), (1, "FAILED")])
@pytest.mark.parametrize("num_steps", [0, 40])
def test_mlflow_ends_a_run_as_the_script_ended(exit_code, status, num_steps, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = manifest(tmp_path / "run", exit_code=exit_code)
    if num_steps:
        record(folder, num_steps, anchor_ns=ANCHOR_NS)
    follower = Follower(folder)
    with Mlflow().open("experiment", follower.look(is_last=False).profile.run) as write:
        write(follower.look(is_last=True))  # with nothing new
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert run.info.status == status
    if num_steps:
        [last] = client.get_metric_history(run.info.run_id, "diagnose/summary/step_ms")
        assert last.step == 39 and BEGUN_UNIX < last.timestamp / 1000 < BEGUN_UNIX + 10


def test_the_last_figures_are_of_the_last_step_also_where_nothing_was_new(tmp_path):
    follower = Follower(failed_run(tmp_path / "run"))
    follower.look(is_last=False)
    reading = follower.look(is_last=True)
    assert reading.points == ()
    with Tensorboard().open(str(tmp_path / "tb"), reading.profile.run) as write:
        write(reading)
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    for tag in ("diagnose/summary/step_ms", "diagnose/report"):
        [last] = board.Tensors(tag)
        assert last.step == 39 and BEGUN_UNIX < last.wall_time < BEGUN_UNIX + 10


def test_a_run_without_steps_is_of_now(tmp_path):
    export_once(manifest(tmp_path / "run"), [Destination(name="tensorboard", target=str(tmp_path / "tb"))])
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    [last] = board.Tensors("diagnose/report")
    assert last.step == 0 and last.wall_time == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(("silent_s", "goes_on"), [(1.0, True), (SILENT_S + 60, False)])
def test_a_run_of_another_machine_goes_on_while_it_records(silent_s, goes_on, tmp_path):
    folder = manifest(tmp_path / "run", ended_unix=None, exit_code=None)
    assert _goes_on(folder), "it began a minute ago"
    file = writer(folder)
    file.set_meta({"state": {"updated_unix": time.time() - silent_s, "finished": False}})
    file.close()
    assert _goes_on(folder) is goes_on


def test_a_rank_keeps_its_name_when_it_is_restarted(tmp_path):
    record(manifest(tmp_path / "run"), 40, restart=2)
    reading = Follower(tmp_path / "run").look(is_last=True)
    assert [rank.name for rank in reading.ranks] == ["0"]
    names = [
        each["args"]["name"]
        for each in trace_of(reading)["traceEvents"]
        if each["ph"] == "M" and each["name"] == "process_name"
    ]
    assert names == ["rank 0 on somewhere"]
