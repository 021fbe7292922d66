"""The table of a run's steps, in Python and as a file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest

import diagnose
from diagnose.analysis.profile import load_profile
from diagnose.core.errors import DiagnoseError
from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS
from diagnose.export._live import export_once
from diagnose.export.base import Destination
from tests.recorded import BATCH, manifest, record


def phases_of(table: pd.DataFrame) -> list[str]:
    return [name for name in (f"{phase.value}_ms" for phase in Phase) if name in table]


def test_the_phases_of_each_step_sum_to_it_and_their_means_are_the_reports(tmp_path: Path) -> None:
    run = manifest(tmp_path / "run", warmup=5)
    record(run, 200)
    table = diagnose.read_steps(run)
    assert table["step"].tolist() == list(range(200))
    assert table["warmup"].sum() == 5 and table["warmup"][:5].all()
    assert (table[phases_of(table)].sum(axis=1) - table["step_ms"]).abs().max() < 1e-9
    profile, measured = load_profile(run), table[~table["warmup"]]
    assert measured["step_ms"].mean() == pytest.approx(profile.step_time_ns / NS_PER_MS)
    for name in phases_of(table):
        phase = Phase(name.removesuffix("_ms"))
        assert measured[name].mean() == pytest.approx(profile.phase_time_ns[phase] / NS_PER_MS), name
    assert "checkpoint_ms" not in table, "no step saved anything"
    assert (table["samples"] == BATCH).all()
    assert table["end_s"][0] == 0 and table["end_s"].is_monotonic_increasing


def test_each_rank_has_its_rows(tmp_path: Path) -> None:
    run = manifest(tmp_path / "run")
    record(run, 30, rank=0, world_size=2)
    record(run, 40, rank=1, world_size=2, slots_ms={"forward": 50.0})
    table = diagnose.read_steps(str(run))
    assert table.groupby("rank").size().to_dict() == {0: 30, 1: 40}
    late = table[table["rank"] == 1]
    assert (late["forward_ms"] == late["step_ms"]).all() and (late["backward_ms"] == 0).all()


def test_a_damaged_file_is_said_and_the_other_rank_is_there(tmp_path: Path) -> None:
    run = manifest(tmp_path / "run")
    record(run, 30, rank=0, world_size=2)
    record(run, 30, rank=1, world_size=2)
    torn = next(path for path in run.glob("rank1*.sqlite"))
    torn.write_bytes(b"not a database" * 100)
    with pytest.warns(UserWarning, match="rank1"):
        table = diagnose.read_steps(run)
    assert set(table["rank"]) == {0}


def test_a_run_without_steps_is_an_empty_table_and_a_folder_without_a_run_an_error(tmp_path: Path) -> None:
    table = diagnose.read_steps(manifest(tmp_path / "run"))
    assert table.empty and {"rank", "step", "step_ms", "forward_ms"} <= set(table.columns)
    with pytest.raises(DiagnoseError, match="is not a run"):
        diagnose.read_steps(tmp_path)


@pytest.mark.parametrize("name", ["steps.csv", "steps.csv.gz"])
def test_the_file_reads_back_as_the_table(name: str, tmp_path: Path) -> None:
    run = manifest(tmp_path / "run")
    record(run, 60)
    target = tmp_path / name
    export_once(run, [Destination(name="csv", target=str(target))])
    assert (target.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    text = gzip.decompress(target.read_bytes()) if name.endswith(".gz") else target.read_bytes()
    assert text.startswith(b"rank,step,warmup,end_s,step_ms,data_wait_ms,")
    read = pd.read_csv(target)
    pd.testing.assert_frame_equal(read, diagnose.read_steps(run), check_exact=False, atol=1e-6)
