"""A bare checkout, an editable installation and an installed copy hold the same packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import diagnose

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]

# Also by another name: a module that is reachable twice would run twice and hold two sets of classes.
REPORT = """
import sys, diagnose, diagnose.core.phases, diagnose.kernels, diagnose.dashboards
from pathlib import Path
print(diagnose.__version__)
for module in (diagnose, diagnose.core.phases, diagnose.kernels, diagnose.dashboards):
    print(module.__name__, module.__spec__.parent, Path(module.__file__).name)
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("kernels", "dashboards")))
"""
REPORTED = """\
{version}
diagnose diagnose __init__.py
diagnose.core.phases diagnose.core phases.py
diagnose.kernels diagnose.kernels __init__.py
diagnose.dashboards diagnose.dashboards __init__.py
[]
"""


def packages_in_tree() -> set[str]:
    """The package of every shipped Python file, `kernels/` and `dashboards/` under their import names."""
    folders = {path.parent.relative_to(REPOSITORY) for path in REPOSITORY.glob("diagnose/**/*.py")}
    beside = {f"diagnose.{top}" for top in ("kernels", "dashboards")}
    return beside | {".".join(folder.parts) for folder in folders}


def python(source: str, *, folder: Path, path: Path | None = None) -> str:
    """What `source` prints in a fresh interpreter that sees no other copy of the package than `path`'s."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        # As an installer does: the folder counts as a site folder, and its .pth files are run.
        source = f"import site; site.addsitedir({str(path)!r})\n{source}"
    command = [sys.executable, "-S", "-c", source]  # -S: not the copy that may be installed for the tests
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from: building leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    for name in ("diagnose", "kernels", "dashboards"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def unpacked(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds a wheel by the named function of setuptools and unpacks it, as installing does."""

    def build(function: str) -> Path:
        wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
        source = f"from setuptools import build_meta; build_meta.{function}({str(wheels)!r})"
        subprocess.run([sys.executable, "-c", source], cwd=checkout, capture_output=True, check=True)
        (wheel,) = wheels.glob("torch_diagnose-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        return site

    return build


def test_packages_in_pyproject_are_those_of_the_tree() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_in_tree()


def test_a_bare_checkout_imports_kernels_and_dashboards_as_ours() -> None:
    assert python(REPORT, folder=REPOSITORY) == REPORTED.format(version=diagnose.__version__)


def test_an_editable_installation_imports_the_same(unpacked: Build, tmp_path: Path) -> None:
    site = unpacked("build_editable")
    assert python(REPORT, folder=tmp_path, path=site) == REPORTED.format(version=diagnose.__version__)


def test_an_installed_copy_imports_the_same_and_holds_every_file(unpacked: Build, tmp_path: Path) -> None:
    site = unpacked("build_wheel")
    assert python(REPORT, folder=tmp_path, path=site) == REPORTED.format(version=diagnose.__version__)
    shipped = {
        str(Path("diagnose" if top != "diagnose" else "", path.relative_to(REPOSITORY)))
        for top in ("diagnose", "kernels", "dashboards")
        for path in (REPOSITORY / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    installed = {str(path.relative_to(site)) for path in site.glob("diagnose/**/*") if path.is_file()}
    assert {name for name in installed if "__pycache__" not in name} == shipped
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    assert entry_points.read_text() == (
        "[console_scripts]\ndiagnose = diagnose.cli.main:main\n\n"
        "[pytest11]\ndiagnose = diagnose.gate.pytest_plugin\n"
    )
