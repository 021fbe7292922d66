"""`tuned.toml`: TOML whatever the script is called, and refused in words where it is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.core.errors import DiagnoseError
from diagnose.tuner.kept import read, to_toml


@pytest.mark.parametrize("script", ["train.py", "größe/трейн.py", "caf\udce9/train.py", "two\nlines.py"])
def test_a_script_of_any_name_leaves_a_file_that_can_be_read(tmp_path: Path, script: str) -> None:
    path = tmp_path / "tuned.toml"
    kept = '[[action]]\nname = "pin-memory"\n'
    path.write_text(to_toml([], None, script) + kept, encoding="utf-8")
    assert [each.action for each in read(path)] == ["pin-memory"]
    assert ("größe" in script) == ("größe" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[action]\nname = "pin-memory"\n', r"an action begins with \[\[action\]\], in double brackets"),
        ('action = ["pin-memory"]\n', r"an action begins with \[\[action\]\], in double brackets"),
        ('[[action]]\nname = "loader-workers"\nvalue = 0\n', "a positive whole number if any; .* and 0"),
        ('[[action]]\nname = "loader-workers"\nvalue = true\n', "it has 'loader-workers' and True"),
        ("[[action]]\nvalue = 2\n", "action 1 needs a name in quotes"),
        ("", "names no action"),
    ],
)
def test_a_file_of_settings_that_is_none_is_refused_in_words(tmp_path, text, reason):
    file = tmp_path / "tuned.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DiagnoseError, match=reason):
        read(file)
