"""A result for people and for programs, with hostile names wherever a name can stand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diagnose.gate import as_github
from diagnose.gate.as_gitlab import to_gitlab
from diagnose.gate.as_json import to_json
from diagnose.gate.as_junit import to_junit
from diagnose.gate.as_text import gate_text
from diagnose.gate.pairs import Asked, run_pairs
from diagnose.gate.result import Failure, GateResult, Metric, Reason, Side, Verdict
from diagnose.report import Terminal
from tests.gates import check_junit, scripted

HOSTILE = 'a,b:c%0A::error::x\n<img src=x onerror=1>|`"\x1b[31m\x00\udc80.py'
REASONS = (
    Reason(text="forward grew by 3 ms\n::set-output name=x::y", kind="phase", lost_share=0.9),
    Reason(text="new line 100%", kind="line", file=HOSTILE, line=3, lost_share=0.5),
)


def result(verdict: Verdict, **changes: Any) -> GateResult:
    """A result with hostile names wherever a name can stand."""
    paired = run_pairs(scripted({"base": 10, "head": 11}), Asked())
    sides = tuple(
        Side(label=label, name=HOSTILE, commit="0123456789" * 4, root=Path(), command=(HOSTILE,))
        for label in ("base", "head")
    )
    whole = GateResult(
        verdict=verdict,
        metric=Metric.STEP_MS,
        asked=Metric.SAMPLES_PER_S,
        max_drop=0.03,
        sides=sides,
        pairs=paired.pairs,
        runs=paired.runs,
        judgement=paired.judgement,
        folder=Path("/runs"),
        wall_s=12.5,
    )
    return replace(whole, **changes)


FAILED = Failure(run="base-00", reason="exit code 7", exit_code=7, signal=None, last_lines=(HOSTILE, "```"))
ALL = [
    result(Verdict.PASS),
    result(Verdict.REGRESSION, why=REASONS),
    result(Verdict.INCONCLUSIVE, causes=(HOSTILE,), advice="wait", judgement=None),
    result(Verdict.MISMATCH, causes=("cpu: A then, B now",), judgement=None),
    result(Verdict.FAILED, failure=FAILED, judgement=None),
]


def named(each: GateResult) -> str:
    return each.verdict.value


@pytest.mark.parametrize("each", ALL, ids=named)
def test_junit_fails_only_for_a_regression(each: GateResult) -> None:
    case = check_junit(to_junit(each))
    expected = {
        "regression": "failure",
        "failed": "error",
        "inconclusive": "skipped",
        "mismatch": "skipped",
    }
    assert case.attrib["name"] == "samples_per_s", "whatever was judged instead, a CI system sees one test"
    kinds = [child.tag for child in case if child.tag != "system-out"]
    assert kinds == ([expected[each.verdict.value]] if each.verdict is not Verdict.PASS else [])


@pytest.mark.parametrize("each", ALL, ids=named)
def test_github_gets_one_command_per_line_and_nothing_else(each: GateResult) -> None:
    level = {"pass": "notice", "regression": "error", "failed": "error"}.get(each.verdict.value, "warning")
    lines = as_github.workflow_commands(each)
    assert all(re.fullmatch(r"::(error|warning|notice) [^\r\n]*::[^\r\n]*", line) for line in lines)
    assert lines[0].startswith(f"::{level} title=diagnose gate::")
    if each.why:
        assert lines[1] == (
            "::warning file=a%2Cb%3Ac%250A%3A%3Aerror%3A%3Ax%0A<img src=x onerror=1>|"
            '`"\x1b[31m\x00\udc80.py,'
            "line=3,title=slower here::new line 100%25"
        )


def test_a_line_is_only_blamed_for_what_is_known_of_it() -> None:
    kinds = ("line", "finding", "diff", "event")
    why = tuple(Reason(text="x", kind=kind, file="train.py", line=3) for kind in kinds)
    found = result(Verdict.REGRESSION, why=why)
    assert as_github.workflow_commands(found)[1:] == [
        "::warning file=train.py,line=3,title=slower here::x",
        "::warning file=train.py,line=3,title=new fault::x",
        "::notice file=train.py,line=3,title=changed in the hot path::x",
        "::notice file=train.py,line=3,title=changed in the hot path::x",
    ]
    severities = [issue["severity"] for issue in json.loads(to_gitlab(found))]
    assert severities == ["major", "minor", "minor", "info", "info"]


def test_github_shows_ten_annotations_at_most() -> None:
    many = result(Verdict.REGRESSION, why=REASONS[1:] * 50)
    assert sum(line.startswith("::warning") for line in as_github.workflow_commands(many)) == 10


@pytest.mark.parametrize("each", ALL, ids=named)
def test_the_summary_holds_no_html_and_no_second_table(each: GateResult) -> None:
    text = as_github.summary(each)
    outside, _, _ = text.partition("```")
    assert "<img" not in outside
    assert all(line.count("|") - line.count(r"\|") == 3 for line in outside.splitlines() if line[:1] == "|")


def test_a_summary_is_cut_where_github_would_drop_it(tmp_path: Path) -> None:
    many = result(Verdict.REGRESSION, why=REASONS * 20_000)
    text = as_github.summary(many)
    assert 1_000_000 < len(text.encode("utf-8", "replace")) <= as_github.MOST_BYTES
    assert text.endswith("the rest is in the JSON report\n")
    file = tmp_path / "summary.md"
    file.write_text("an earlier step\n")
    as_github.append_summary(many, file)
    assert file.read_text() == "an earlier step\n", "with it the whole file would be dropped"
    as_github.append_summary(result(Verdict.PASS), file)
    assert file.read_text().startswith("an earlier step\n## diagnose gate: PASS")


@pytest.mark.parametrize("each", ALL, ids=named)
def test_the_terminal_is_told_nothing_to_obey(each: GateResult) -> None:
    text = gate_text(each, Terminal(width=80))
    assert text.startswith(each.verdict.label)
    assert not {"\x1b", "\x00", "\r"} & set(text)
    assert len(text.splitlines()) <= 24 + len(each.why), "one screen"


@pytest.mark.parametrize("each", ALL, ids=named)
def test_in_a_tests_message_github_finds_nothing_to_obey(each: GateResult) -> None:
    text = gate_text(each, Terminal(width=80)) + "\n::error::x\n  ::set-env name=a::b\nsay ##[group]x"
    lines = as_github.harmless(text).split("\n")
    assert not [line for line in lines if line.lstrip().startswith("::") or "##[" in line]
    assert len(lines) == len(text.split("\n"))


@pytest.mark.parametrize("each", ALL, ids=named)
def test_json_and_the_code_quality_report_can_be_parsed(each: GateResult) -> None:
    answer = json.loads(json.dumps(to_json(each), allow_nan=False))
    assert answer["exit_code"] == {"pass": 0, "regression": 1, "inconclusive": 3, "mismatch": 4}.get(
        each.verdict.value, 5
    )
    assert set(answer) == set(to_json(ALL[0]))
    issues = json.loads(to_gitlab(each))
    assert all(
        set(issue) == {"description", "check_name", "fingerprint", "severity", "location"}
        for issue in issues
    )
    assert len({issue["fingerprint"] for issue in issues}) == len(issues)
    assert len(issues) == {"pass": 0, "regression": 2, "failed": 0}.get(each.verdict.value, 1)


def test_the_code_quality_report_points_to_the_file_of_a_module() -> None:
    side = replace(ALL[1].sides[-1], command=("-m", "jobs.train", "--epochs", "1"))
    (issue, *_) = json.loads(to_gitlab(replace(ALL[1], sides=(side,))))
    assert issue["location"]["path"] == "jobs/train.py"
    side = replace(
        side, root=Path("/home/me/repo/jobs"), folder="jobs", command=("/home/me/repo/jobs/a.py",)
    )
    (issue, *_) = json.loads(to_gitlab(replace(ALL[1], sides=(side,))))
    assert issue["location"]["path"] == "jobs/a.py"
