"""`diagnose run`, as typer calls it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diagnose.cli.run import run
from diagnose.launch import run as launch
from diagnose.launch import supervisor


def test_paths_are_paths_also_where_typers_context_holds_them_as_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As that of typer before 0.28 does; its arguments are converted all the same."""
    asked: list[Any] = []
    monkeypatch.setattr(launch, "run", lambda target, settings, torchrun: asked.append(settings))
    monkeypatch.setattr(supervisor, "end_as", lambda code: None)
    names = run.__annotations__.keys() - {"context", "return"}
    params = dict.fromkeys(names) | {"script": "train.py", "is_module": False, "json": "a.json"}
    context: Any = SimpleNamespace(params=params, args=[])
    run(context, "train.py", json=Path("a.json"))
    assert asked[0].json == Path("a.json")
