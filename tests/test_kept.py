"""`tuned.toml` is TOML whatever the script is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.tuner.kept import read, to_toml


@pytest.mark.parametrize("script", ["train.py", "größe/трейн.py", "caf\udce9/train.py", "two\nlines.py"])
def test_a_script_of_any_name_leaves_a_file_that_can_be_read(tmp_path: Path, script: str) -> None:
    path = tmp_path / "tuned.toml"
    kept = '[[action]]\nname = "pin-memory"\n'
    path.write_text(to_toml([], None, script) + kept, encoding="utf-8")
    assert [each.action for each in read(path)] == ["pin-memory"]
    assert ("größe" in script) == ("größe" in path.read_text(encoding="utf-8"))
