"""Imports go one way: a folder may use its own group of folders and those to its left, nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

GROUPS = (
    ("core",),
    ("hooks", "store", "source", "kernels"),
    ("analysis",),
    ("rules", "actions"),
    ("tuner", "report", "gate"),
    ("export",),
    ("launch", "dashboards"),
    ("cli", "callbacks"),
)
RANK = {folder: rank for rank, group in enumerate(GROUPS) for folder in group}

# The package itself is a door: what it gives away lazily belongs to the folder that defines it.
DOOR = {
    "attach": "launch",
    "detach": "launch",
    "step": "launch",
    "read_steps": "analysis",
    "__version__": "core",
}

ONLY_IN = {
    "torch": {"hooks", "actions", "kernels", "launch"},
    "dash": {"dashboards"},
    "pandas": {"analysis"},
}
HEAVY = ("torch", "dash", "pandas", "plotly")


def sources() -> list[Path]:
    """Every Python file that ships."""
    return sorted(
        path
        for folder in ("diagnose", "kernels", "dashboards")
        for path in REPOSITORY.glob(f"{folder}/**/*.py")
    )


def folder_of(path: Path) -> str:
    """The layer's name of a file: `hooks`, `gate`, or `cli` for `python -m diagnose`; `` for the door."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    if parts[0] != "diagnose":
        return parts[0]
    return {"__init__": "", "__main__": "cli"}.get(parts[1], parts[1])


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each imported name in full, wherever in the file it is imported, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "ruff bans relative imports"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(folder: str, source: str) -> list[str]:
    """What a file of `folder` imports although it must not, one sentence each."""
    found = []
    for line, name in imported_names(ast.parse(source)):
        top, _, rest = name.partition(".")
        if top in ONLY_IN and folder not in ONLY_IN[top]:
            found.append(f"line {line}: {folder} imports {top}")
        elif top == "diagnose" and rest and folder:
            target = DOOR.get(rest, rest.split(".")[0])
            if target not in RANK:
                found.append(f"line {line}: {name} is in no layer; add its folder to GROUPS")
            elif RANK[target] > RANK[folder]:
                found.append(f"line {line}: {folder} imports {target}, which is to its right")
        elif folder == "core" and top not in sys.stdlib_module_names:
            found.append(f"line {line}: core imports {top}, which is not in the standard library")
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_imports_go_to_the_left(path: Path) -> None:
    folder = folder_of(path)
    assert folder == "" or folder in RANK, f"{folder} is in no layer; add it to GROUPS and to the map"
    assert violations(folder, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "folder, source, expected",
    [
        ("hooks", "from diagnose.core.phases import Phase\nimport torch", []),
        ("hooks", "from diagnose.store.writer import Writer", []),
        ("cli", "from diagnose import gate, __version__", []),
        ("hooks", "import diagnose.cli.main", ["line 1: hooks imports cli, which is to its right"]),
        ("store", "\nfrom diagnose import attach", ["line 2: store imports launch, which is to its right"]),
        ("rules", "from diagnose import gate", ["line 1: rules imports gate, which is to its right"]),
        (
            "core",
            "def f():\n    import numpy",
            ["line 2: core imports numpy, which is not in the standard library"],
        ),
        ("report", "import torch.nn", ["line 1: report imports torch"]),
        ("store", "from pandas import DataFrame", ["line 1: store imports pandas"]),
        (
            "cli",
            "from diagnose.tools import x",
            ["line 1: diagnose.tools.x is in no layer; add its folder to GROUPS"],
        ),
    ],
)
def test_a_wrong_import_is_named_with_its_line(folder: str, source: str, expected: list[str]) -> None:
    assert violations(folder, source) == expected


def test_boot_needs_only_the_standard_library_when_it_is_imported() -> None:
    boot = REPOSITORY / "diagnose" / "launch" / "boot" / "sitecustomize.py"
    tree = ast.parse(boot.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in functions:
        tree.body.remove(node)
    tops = {name.split(".")[0] for _, name in imported_names(tree)}
    assert tops <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "arguments", [("-c", "import diagnose"), ("-m", "diagnose", "--help")], ids=" ".join
)
def test_starting_up_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "diagnose" in imported
    assert imported.isdisjoint(HEAVY)
