"""Settings come from the command line, the environment, pyproject.toml and defaults, in this order."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.core.errors import DiagnoseError
from diagnose.launch.settings import Settings, resolve


def write_project(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(text)
    return path


def test_defaults_hold_where_nothing_is_set(tmp_path):
    assert resolve({"steps": None, "quiet": None}, {}, tmp_path) == Settings(
        run_dir=Path(".diagnose/runs"),
        name=None,
        json=None,
        html=None,
        steps=None,
        stop_after=None,
        warmup=None,
        nproc_per_node=None,
        quiet=False,
    )


@pytest.mark.parametrize(
    "command_line, environ, expected",
    [
        ({"steps": 1}, {"DIAGNOSE_STEPS": "2"}, 1),
        ({"steps": None}, {"DIAGNOSE_STEPS": "2"}, 2),
        ({"steps": None}, {"DIAGNOSE_STEPS": ""}, 3),
        ({}, {}, 3),
    ],
)
def test_the_command_line_beats_the_environment_beats_the_project(
    tmp_path, command_line, environ, expected
):
    write_project(tmp_path, "[tool.diagnose]\nsteps = 3\n")
    assert resolve(command_line, environ, tmp_path).steps == expected


def test_every_setting_can_stand_in_the_environment(tmp_path):
    environ = {
        "DIAGNOSE_DIR": "runs",
        "DIAGNOSE_NAME": "große Änderung",
        "DIAGNOSE_JSON": "a b.json",
        "DIAGNOSE_HTML": "c.html",
        "DIAGNOSE_STEPS": "10",
        "DIAGNOSE_STOP_AFTER": "20",
        "DIAGNOSE_WARMUP": "0",
        "DIAGNOSE_NPROC_PER_NODE": "gpu",
        "DIAGNOSE_QUIET": "1",
    }
    assert resolve({}, environ, tmp_path) == Settings(
        run_dir=Path("runs"),
        name="große Änderung",
        json=Path("a b.json"),
        html=Path("c.html"),
        steps=10,
        stop_after=20,
        warmup=0,
        nproc_per_node="gpu",
        quiet=True,
    )


def test_every_setting_can_stand_in_the_project_file_whose_paths_start_at_the_file(tmp_path):
    write_project(
        tmp_path,
        """
        [tool.diagnose]
        run-dir = "runs"
        name = "base"
        json = "out.json"
        html = "/tmp/out.html"
        steps = 10
        stop-after = 20
        warmup = 0
        nproc-per-node = 2
        quiet = true
        """,
    )
    below = tmp_path / "jobs" / "vision"
    below.mkdir(parents=True)
    assert resolve({}, {}, below) == Settings(
        run_dir=tmp_path / "runs",
        name="base",
        json=tmp_path / "out.json",
        html=Path("/tmp/out.html"),
        steps=10,
        stop_after=20,
        warmup=0,
        nproc_per_node="2",
        quiet=True,
    )


def test_the_nearest_project_file_is_the_one_that_counts(tmp_path):
    write_project(tmp_path, "[tool.diagnose]\nsteps = 3\n")
    (tmp_path / "inner").mkdir()
    write_project(tmp_path / "inner", "[project]\nname = 'x'\n")
    assert resolve({}, {}, tmp_path / "inner").steps is None


@pytest.mark.parametrize(
    "line, problem",
    [
        (
            "step = 3",
            "step: there is no such setting. There are: run-dir, name, json, html, steps, stop-after, "
            "warmup, nproc-per-node, ranks, quiet, tune, allow, only, skip, dry-run, apply, "
            "dashboard, deep-window, export.",
        ),
        ("steps = 'many'", "steps: must be a whole number of 1 or more, not 'many'."),
        ("steps = 0", "steps: must be a whole number of 1 or more, not 0."),
        ("steps = true", "steps: must be a whole number of 1 or more, not True."),
        ("warmup = -1", "warmup: must be a whole number of 0 or more, not -1."),
        ("quiet = 'yes'", "quiet: must be true or false, not 'yes'."),
        ("name = 7", "name: must be text, not 7."),
        ("json = ''", "json: must be text, not ''."),
        ("nproc-per-node = 1.5", "nproc-per-node: must be a number of processes, not 1.5."),
        (
            "deep-window = '3:9'",
            "deep-window: must be STEP, STEP:COUNT with a COUNT of 1 to 5, or auto, not '3:9'.",
        ),
    ],
)
def test_a_wrong_key_or_value_in_the_project_is_named_with_its_file(tmp_path, line, problem):
    path = write_project(tmp_path, f"[tool.diagnose]\n{line}\n")
    with pytest.raises(DiagnoseError) as caught:
        resolve({}, {}, tmp_path)
    assert str(caught.value) == f"{path}: [tool.diagnose] {problem}"


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("DIAGNOSE_STEPS", "ten", "must be a whole number of 1 or more, not 'ten'."),
        ("DIAGNOSE_STOP_AFTER", "0", "must be a whole number of 1 or more, not 0."),
        ("DIAGNOSE_QUIET", "maybe", "must be true or false, not 'maybe'."),
    ],
)
def test_a_wrong_value_in_the_environment_is_named_with_its_variable(tmp_path, name, text, problem):
    with pytest.raises(DiagnoseError) as caught:
        resolve({}, {name: text}, tmp_path)
    assert str(caught.value) == f"{name}: {problem}"


def test_a_broken_project_file_matters_only_if_it_speaks_of_us(tmp_path):
    path = write_project(tmp_path, "[tool.other\n")
    assert resolve({}, {}, tmp_path) == Settings()
    path.write_text("[tool.diagnose\n")
    with pytest.raises(DiagnoseError, match=r"cannot read .*pyproject\.toml: "):
        resolve({}, {}, tmp_path)


def test_a_project_without_our_table_sets_nothing(tmp_path):
    write_project(tmp_path, "[project]\ndescription = 'diagnose this'\n")
    assert resolve({}, {}, tmp_path) == Settings()


@pytest.mark.parametrize("key", ["allow", "only", "skip"])
def test_to_choose_among_fixes_and_ask_for_none_is_a_mistake_on_the_command_line_alone(tmp_path, key):
    chosen = "precision" if key == "allow" else "gc-freeze"
    with pytest.raises(DiagnoseError, match=f"--{key} is about the fixes that --tune tries"):
        resolve({key: [chosen]}, {}, tmp_path)
    for asking in ({"tune": True}, {"dry_run": True}, {"apply": Path("tuned.toml")}):
        assert getattr(resolve({key: [chosen], **asking}, {}, tmp_path), key) == (chosen,)
    write_project(tmp_path, f"[tool.diagnose]\n{key} = ['{chosen}']\n")
    assert not resolve({}, {}, tmp_path).tunes


def test_a_variable_names_the_only_settings_to_read_from_the_project(tmp_path):
    write_project(tmp_path, "[tool.diagnose]\nnproc-per-node = 2\nsteps = 3\nof-another-version = true\n")
    assert resolve({}, {"DIAGNOSE_PROJECT": "nproc_per_node"}, tmp_path) == Settings(nproc_per_node="2")
    assert resolve({}, {"DIAGNOSE_PROJECT": "no"}, tmp_path) == Settings()


def test_a_rank_starts_further_ranks_only_where_its_command_line_says_so(tmp_path):
    write_project(tmp_path, "[tool.diagnose]\nnproc-per-node = 2\n")
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    of_hosts = {"RANK": "1", "WORLD_SIZE": "2"}
    assert resolve({}, of_hosts, tmp_path).nproc_per_node == "2", "as some clusters number them"
    assert resolve({}, {}, tmp_path).nproc_per_node == "2"
    assert resolve({}, rank, tmp_path).nproc_per_node is None
    assert resolve({}, {**rank, "DIAGNOSE_NPROC_PER_NODE": "4"}, tmp_path).nproc_per_node is None
    assert resolve({"nproc_per_node": "3"}, rank, tmp_path).nproc_per_node == "3"
