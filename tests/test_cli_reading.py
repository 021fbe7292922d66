"""`diagnose report`, `runs`, `compare` and `status` on runs as they lie on disk."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diagnose.cli.main import main
from diagnose.core.ledger import COLUMNS
from diagnose.core.trial import Outcome, Safety, Trial
from diagnose.store.writer import Writer
from tests.running import run

MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    code: int
    out: str
    err: str


Diagnose = Callable[..., Answer]


@pytest.fixture
def diagnose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Diagnose:
    """The command line, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIAGNOSE_DIR", raising=False)
    monkeypatch.setenv("DIAGNOSE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts its own there

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["diagnose", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Answer(code=int(ended.value.code or 0), out=printed.out, err=printed.err)

    return call


def record(
    root: Path, name: str, *, started: int, forward_ms: float, steps: int = 100, exit_code: int | None = 0
) -> Path:
    """Writes a run in which every step waits 1 ms for data and then computes."""
    folder = root / name
    folder.mkdir(parents=True)
    manifest = {
        "schema": 1,
        "id": name,
        "script": "train.py",
        "argv": ["--lr", "1e-3"],
        "started": f"2026-11-20T14:{started:02}:00+01:00",
        "started_unix": started * 60.0,
        "ended_unix": started * 60.0 + 30,
        "exit_code": exit_code,
        "signal": None,
        "warmup": 0,
        "torch": "2.13.0",
        "notes": [],
    }
    (folder / "run.json").write_text(json.dumps(manifest))
    if steps:
        slots = {"data_wait": MS, "forward": int(forward_ms * MS), "samples": 32}
        row = tuple(slots.get(column, 0) for column in COLUMNS)
        writer = Writer(folder, 0)
        writer.add_steps([(end, *row[1:]) for end in range(1, steps + 1)])
        writer.set_meta({"finished": True, "torch": "2.13.0", "rank": 0, "host": "node1"})
        writer.close()
    return folder


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """A root with an older slow run and a newer fast one."""
    root = tmp_path / ".diagnose" / "runs"
    record(root, "slow", started=1, forward_ms=9)
    record(root, "fast", started=2, forward_ms=3, exit_code=1)
    return root


def test_report_shows_the_newest_run(diagnose: Diagnose, two_runs: Path) -> None:
    answer = diagnose("report")
    assert answer.code == 0 and answer.err == ""
    assert answer.out.startswith("run fast\n")
    assert "\n  forward        3.000 ms   75 %  " in answer.out


def test_report_of_a_named_run_by_name_and_by_path(diagnose: Diagnose, two_runs: Path) -> None:
    by_name = diagnose("report", "slow")
    assert by_name.out.startswith("run slow\n")
    assert diagnose("report", two_runs / "slow").out == by_name.out


def test_runs_are_found_where_the_option_or_the_environment_says(
    diagnose: Diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "elsewhere", "here", started=3, forward_ms=1)
    record(tmp_path / "other", "there", started=3, forward_ms=1)
    monkeypatch.setenv("DIAGNOSE_DIR", str(tmp_path / "elsewhere"))
    assert diagnose("report").out.startswith("run here\n")
    assert diagnose("report", "--run-dir", tmp_path / "other").out.startswith("run there\n")


def test_report_as_json_goes_to_stdout_or_to_a_file(
    diagnose: Diagnose, two_runs: Path, tmp_path: Path
) -> None:
    to_stdout = diagnose("report", "slow", "--json", "-")
    report = json.loads(to_stdout.out)
    assert (report["run"]["id"], report["steps"]["median_ms"]) == ("slow", 10.0)
    to_file = diagnose("report", "slow", "--json", "report.json")
    assert (to_file.code, to_file.out, to_file.err) == (0, "", "wrote report.json\n")
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_report_writes_html_and_markdown_in_one_go(
    diagnose: Diagnose, two_runs: Path, tmp_path: Path
) -> None:
    answer = diagnose("report", "--html", "r.html", "--md", "-")
    assert answer.code == 0 and answer.err == "wrote r.html\n"
    assert answer.out.startswith("## diagnose: `train.py`\n")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_a_report_can_begin_later_in_the_run_or_where_tuning_had_kept_its_fixes(
    diagnose: Diagnose, tmp_path: Path
) -> None:
    folder = record(tmp_path / ".diagnose" / "runs", "tuned", started=1, forward_ms=9, steps=0)
    writer = Writer(folder, 0)
    rows, end_ns = [], 0
    for step in range(200):
        forward_ns = (9 if step < 100 else 3) * MS
        end_ns += forward_ns + MS
        slots = {"end_ns": end_ns, "data_wait": MS, "forward": forward_ns, "samples": 32}
        rows.append(tuple(slots.get(column, 0) for column in COLUMNS))
    writer.add_steps(rows)
    kept = Trial(action="channels-last", safety=Safety.ROUNDING, outcome=Outcome.KEPT, reason="")
    events = [
        (50, "tuning", {"state": "trying", "step": 50}),
        (100, "trial", kept.as_record()),
        (100, "tuning", {"state": "holding", "step": 100}),
    ]
    writer.add_events([(step, step, kind, detail) for step, kind, detail in events])
    writer.set_meta({"finished": True, "torch": "2.13.0", "rank": 0, "host": "node1"})
    writer.close()

    whole = json.loads(diagnose("report", "--json", "-").out)
    assert whole["steps"]["median_ms"] == 10
    assert whole["tuning"]["after"]["median_ms"] == 4
    assert whole["tuning"]["after"]["samples_per_s"] == pytest.approx(8000)
    for since in ("tuning", "101"):
        later = json.loads(diagnose("report", "--since", since, "--json", "-").out)
        assert (later["steps"]["median_ms"], later["tuning"]) == (4, None)
        assert later["notes"][0] == "This is about the steps from 101 on alone."
    assert "--since tuning" in diagnose("report").out

    record(folder.parent, "fixed", started=2, forward_ms=3, steps=100)
    compared = json.loads(diagnose("compare", "tuned", "fixed", "--json", "-").out)
    (step_time,) = (metric for metric in compared["metrics"] if metric["unit"] == "ms")
    assert (step_time["before"], step_time["after"]) == (10, pytest.approx(4, rel=1e-3))
    assert any("the first run was tuned: only its" in note for note in compared["notes"])


def test_a_report_cannot_begin_where_nothing_is(diagnose: Diagnose, two_runs: Path) -> None:
    assert "no steps with kept fixes" in diagnose("report", "--since", "tuning").err
    for since in ("0", "-1", "later"):
        answer = diagnose("report", f"--since={since}")
        assert answer.code == 2 and "takes a step from 1 on, or tuning" in answer.err
    beyond = diagnose("report", "--since", "1000")
    assert beyond.code == 0 and "nothing was measured" in beyond.out


def test_only_one_format_can_go_to_stdout(diagnose: Diagnose, two_runs: Path) -> None:
    answer = diagnose("report", "--json", "-", "--md", "-")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "diagnose report: only one of --json, --html and --md can go to stdout.\n"


def test_a_file_that_cannot_be_written_is_said_without_a_traceback(
    diagnose: Diagnose, two_runs: Path
) -> None:
    answer = diagnose("report", "--html", "no/such/folder.html")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "diagnose: cannot write no/such/folder.html: No such file or directory.\n"


@pytest.mark.parametrize("name", ["nosuch", "../../etc", "<img src=x>"])
def test_a_run_that_is_not_there_ends_with_code_2(diagnose: Diagnose, two_runs: Path, name: str) -> None:
    answer = diagnose("report", name)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err and "Traceback" not in answer.err


def test_report_of_a_run_without_steps_says_so(diagnose: Diagnose, tmp_path: Path) -> None:
    record(tmp_path / ".diagnose" / "runs", "empty", started=1, forward_ms=1, steps=0)
    answer = diagnose("report")
    assert answer.code == 0
    assert "No optimizer step was seen in 30.0 s; torch was imported." in answer.out
    assert json.loads(diagnose("report", "--json", "-").out)["status"] == "no_steps"


def test_runs_are_listed_newest_first(diagnose: Diagnose, two_runs: Path) -> None:
    answer = diagnose("runs")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "  Newest first",
        "  run   started           script    ended   steps  median step  samples/s",
        "  fast  2026-11-20 14:02  train.py  exit 1    100      4.00 ms      8,000",
        "  slow  2026-11-20 14:01  train.py  ok        100      10.0 ms      3,200",
    ]


def test_runs_can_be_limited_and_say_how_many_there_are(diagnose: Diagnose, two_runs: Path) -> None:
    answer = diagnose("runs", "--limit", "1")
    assert answer.out.startswith("  1 of 2 runs, newest first\n") and "slow" not in answer.out


def test_runs_as_json_have_what_a_summary_needs(diagnose: Diagnose, two_runs: Path) -> None:
    listed = json.loads(diagnose("runs", "--json", "-").out)
    assert listed["schema"] == 1
    assert [run["name"] for run in listed["runs"]] == ["fast", "slow"]
    assert listed["runs"][0]["throughput"]["samples_per_s"] == pytest.approx(8000)
    assert listed["runs"][0]["run"]["exit_code"] == 1


def test_a_run_that_cannot_be_read_does_not_hide_the_others(diagnose: Diagnose, two_runs: Path) -> None:
    with sqlite3.connect(two_runs / "fast" / "rank0.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    answer = diagnose("runs")
    assert answer.code == 0
    assert "  fast                              unreadable" in answer.out
    assert "  slow  2026-11-20 14:01  train.py  ok " in answer.out
    reason = json.loads(diagnose("runs", "--json", "-").out)["runs"][0]["error"]
    assert "written by a newer diagnose" in reason


def test_no_runs_is_an_answer_and_no_error(diagnose: Diagnose) -> None:
    answer = diagnose("runs")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err == "There are no runs under .diagnose/runs.\nRecord one: diagnose run train.py\n"
    assert json.loads(diagnose("runs", "--json", "-").out) == {"schema": 1, "runs": []}


def test_compare_says_which_phase_got_faster(diagnose: Diagnose, two_runs: Path) -> None:
    answer = diagnose("compare", "slow", "fast")
    assert answer.code == 0
    assert "\n  faster: 3,200 -> 8,000 samples/s, +150 %; " in answer.out
    rows = {line.split("  ")[1]: line for line in answer.out.splitlines() if line.startswith("  ")}
    assert rows["forward"].endswith("faster") and rows["data wait"].endswith("cannot tell")


def test_compare_as_json_judges_every_phase(diagnose: Diagnose, two_runs: Path) -> None:
    compared: dict[str, Any] = json.loads(diagnose("compare", "fast", "slow", "--json", "-").out)
    assert compared["outcome"] == "slower"
    judged = {phase["name"]: phase["outcome"] for phase in compared["phases"]}
    assert (judged["forward"], judged["data_wait"]) == ("slower", "cannot_tell")


def test_compare_needs_two_runs(diagnose: Diagnose, two_runs: Path) -> None:
    answer = diagnose("compare", "slow")
    assert answer.code == 2 and "Missing argument" in answer.err


@pytest.mark.parametrize("verb", ["report", "runs", "compare", "status", "rules"])
def test_help_of_the_reading_verbs_imports_nothing_heavy(tmp_path: Path, verb: str) -> None:
    code = (
        "import sys; from diagnose.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'pandas', 'torch', 'dash', 'plotly'} & set(sys.modules)))"
    )
    ended = run(sys.executable, "-c", code, verb, "--help", cwd=tmp_path)
    assert ended.stdout.endswith("[]\n"), ended.stderr
