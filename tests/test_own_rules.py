"""Rules of other packages: found by entry point, held to the same, harmless when broken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.cli.main import main
from diagnose.core.errors import DiagnoseError
from diagnose.rules import check_rule, diagnosed, profile, rules
from diagnose.rules._engine import ask, built_in
from tests.running import REPOSITORY

PACKAGE = REPOSITORY / "examples" / "own_rules"
BROKEN = "raise RuntimeError('no licence')"
FAILING = '''"""A rule that fails"""
from diagnose.rules import Rule

class Failing(Rule):
    def check(self, profile):
        return profile.no_such_field
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site folder in which packages can be laid down as an installer would."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("team_rules", "strange")):
            del sys.modules[name]


def install(site: Path, package: str, entry_points: str, **files: str) -> None:
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[diagnose.rules]\n{entry_points}\n")
    for name, source in files.items():
        (site / f"{name}.py").write_text(source)


def install_example(site: Path) -> None:
    source = (PACKAGE / "team_rules" / "logging_stall.py").read_text(encoding="utf-8")
    folder = site / "team_rules"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "logging_stall.py").write_text(source)
    install(site, "team-rules", "logging-stall = team_rules.logging_stall")


def test_a_rule_of_an_installed_package_is_asked_with_the_others(installed: Path) -> None:
    install_example(installed)
    assert set(rules()) == {*built_in(), "logging-stall"}
    (example, *_) = rules()["logging-stall"].fires_on
    found = diagnosed(example)
    assert "logging-stall" in {finding.rule for finding in found.findings}
    assert found.num_rules == len(built_in()) + 1


def test_the_example_package_is_held_to_what_the_built_in_rules_are(installed: Path) -> None:
    install_example(installed)
    check_rule(rules()["logging-stall"], others=rules())


def test_a_class_can_be_named_too_and_its_findings_bear_the_name_of_the_entry_point(
    installed: Path,
) -> None:
    install_example(installed)
    install(installed, "alias", "my-name = team_rules.logging_stall:LoggingStall")
    (example, *_) = rules()["my-name"].fires_on
    findings, _ = ask({"my-name": rules()["my-name"]}, example)
    assert [finding.rule for finding in findings] == ["my-name"]


def test_a_rule_that_cannot_be_imported_becomes_a_note_and_the_others_are_asked(installed: Path) -> None:
    install(installed, "strange", "licensed = strange_module", strange_module=BROKEN)
    (example, *_) = next(iter(built_in().values())).fires_on
    found = diagnosed(example)
    assert found.findings
    assert "rule licensed of strange could not be loaded: RuntimeError: no licence" in found.notes, (
        found.notes
    )


def test_a_rule_that_raises_becomes_a_note_and_the_others_are_asked(installed: Path) -> None:
    install(installed, "strange", "failing = strange_failing", strange_failing=FAILING)
    (example, *_) = next(iter(built_in().values())).fires_on
    found = diagnosed(replace(example, notes=("first",)))
    assert found.findings
    assert found.notes[0] == "first"
    assert found.notes[1].startswith("rule failing failed, a bug of the rule: AttributeError: ")


def test_a_name_that_is_taken_is_an_error_to_who_lists_and_a_note_to_who_reads(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = next(iter(built_in()))
    install(installed, "strange", f"{taken} = strange_failing", strange_failing=FAILING)
    message = (
        f"rule {taken} of strange (strange_failing) is left out: a built-in rule has that name. "
        "Give its entry point another name."
    )
    with pytest.raises(DiagnoseError, match="is left out"):
        rules()
    assert message in diagnosed(profile()).notes
    monkeypatch.setattr(sys, "argv", ["diagnose", "rules"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == message + "\n"
