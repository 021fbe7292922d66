"""The runs that the dashboard lists and opens, and the files that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnose.dashboards._source import Source
from diagnose.dashboards.runs import filtered

from diagnose.core.errors import DiagnoseError
from tests.following import until
from tests.recorded import manifest, record, steps, writer


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "../run", "no such", "x" * 200, "run\x00", "linked"]
)
def test_only_a_listed_run_is_opened(tmp_path: Path, name: str) -> None:
    record(manifest(tmp_path / "elsewhere" / "secret"), 5)
    root = tmp_path / "runs"
    record(manifest(root / "run"), 5)
    (root / "linked").symlink_to(tmp_path / "elsewhere" / "secret")
    source = Source(root)
    with pytest.raises(DiagnoseError):
        source.folder(name)
    assert source.folder("run") == root / "run"


def test_a_source_file_is_shown_only_where_the_analysis_names_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(f"line {number}" for number in range(1, 21)))
    folder = manifest(tmp_path / "runs" / "run")
    file = writer(folder)
    file.add_steps(steps(0, 400))
    file.add_samples(0, [(0, [("", 0, ""), (str(script), 10, "main")], 1_000_000_000)])
    file.close()
    source = Source(tmp_path / "runs")
    try:
        live = source.run("run")
        snapshot = until(live, lambda now: now.profile is not None)
        assert snapshot.profile is not None
        assert [line.file for line in snapshot.profile.where] == [str(script)]
        assert source.source_lines("run", str(script), 10, around=1) == (
            (9, "line 9"),
            (10, "line 10"),
            (11, "line 11"),
        )
        assert source.source_lines("run", "/etc/passwd", 1) == ()
        assert source.source_lines("other", str(script), 1) == ()
    finally:
        source.close()


def test_the_list_tells_what_is_known_without_reading_every_step(tmp_path: Path) -> None:
    record(manifest(tmp_path / "good", started_unix=1.0), 400)
    manifest(tmp_path / "empty", started_unix=2.0, exit_code=1)
    (manifest(tmp_path / "bad", started_unix=3.0) / "rank0.sqlite").write_bytes(b"no database" * 100)
    source = Source(tmp_path)
    try:
        rows = {row.id: row for row in source.runs()}
    finally:
        source.close()
    assert list(rows) == ["bad", "empty", "good"]
    assert (rows["good"].num_steps, rows["good"].words) == (400, "ended (ok)")
    assert rows["good"].step_ms == pytest.approx(38.2, abs=0.5)
    assert rows["good"].samples_per_s == pytest.approx(32 / 0.0382, rel=0.02)
    assert (rows["empty"].num_steps, rows["empty"].step_ms) == (0, None)
    assert rows["bad"].note


def test_the_runs_that_went_wrong_are_found_and_no_others(tmp_path: Path) -> None:
    record(manifest(tmp_path / "good", started_unix=1.0), 40)
    record(manifest(tmp_path / "attached", started_unix=2.0, exit_code=None, ended_unix=None), 40)
    record(manifest(tmp_path / "crashed", started_unix=3.0, exit_code=1), 40)
    record(manifest(tmp_path / "killed", started_unix=4.0, exit_code=None, signal=9), 40)
    record(manifest(tmp_path / "raised", started_unix=5.0, exit_code=None), 40, error="ValueError")
    writer(manifest(tmp_path / "left", started_unix=6.0, exit_code=None, ended_unix=None)).close()
    source = Source(tmp_path)
    try:
        rows = source.runs()
    finally:
        source.close()
    assert [row.id for row in filtered(rows, "failed", "")] == ["left", "raised", "killed", "crashed"]
    assert [row.id for row in filtered(rows, "ended", "")] == [
        *("raised", "killed", "crashed", "attached", "good")
    ]
