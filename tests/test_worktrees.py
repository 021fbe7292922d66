"""Two versions beside each other: whose code each runs, and what is left of their worktrees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diagnose.core.errors import DiagnoseError
from diagnose.gate import imports
from diagnose.gate.compare_commits import GateRequest, Plumbing, compare_versions, sigterm_unwinds
from diagnose.gate.imports import why_same_code
from diagnose.gate.measure import RunPlan
from diagnose.gate.pairs import Asked
from diagnose.gate.result import MeasuredRun, Side, Verdict
from diagnose.gate.sides import moved_path
from diagnose.gate.worktrees import (
    DEAD_AFTER_S,
    LOCK,
    PREFIX,
    TIDY,
    NotInThisVersion,
    note_of_submodules,
    worktrees,
)
from tests.gates import commit, git, measured_stand_in, repository, stand_in
from tests.running import BY_PATH, run, write

TRAIN = "from net import STEP_MS\nprint(STEP_MS, STEP_MS)\n"

WORK = "import time\n\ndef work():\n    time.sleep(0.01)\n"
TRAINS = """\
import torch
from net import work
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
for _ in range(1000):
    work()
    (weight * 2).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A repository with a package folder, by a name that leads there over a symbolic link."""
    top = repository(tmp_path / "real" / "repo")
    for step_ms in (10, 12):
        (top / "train.py").write_text(TRAIN)
        commit(top, f"STEP_MS = {step_ms}\n", path="src/net.py")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    return tmp_path / "link" / "repo"


def request_in(cwd: Path, folder: Path) -> GateRequest:
    """The comparison of the last two commits of `train.py`."""
    commands = (("train.py",),) * 2
    return GateRequest(
        asked=Asked(), commits="main~1..main", commands=commands, cwd=cwd, folder=folder / "runs"
    )


# -- whose code a version runs


def test_each_version_imports_its_own_code_though_the_path_leads_over_a_link(
    linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        done = subprocess.run(
            [sys.executable, "-B", *side.command],
            cwd=side.root,
            env={**os.environ, **side.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        usual, _ = done.stdout.split()
        return measured_stand_in(
            Side(
                label="",
                name="",
                root=tmp_path,
                command=(str(write(tmp_path / "said.py", stand_in(float(usual)))),),
            ),
            name,
            folder,
            plan,
        )

    monkeypatch.setenv("PYTHONPATH", str(linked / "src"))
    request = request_in(linked, tmp_path)
    assert compare_versions(request, Plumbing(measure=measure)).verdict is Verdict.REGRESSION


def test_import_paths_move_by_whatever_name_they_lead_into_the_repository(
    linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, root = linked.resolve(), tmp_path / "base"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "short").symlink_to(top / "src")
    (top / "out").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(top / "src")
    moves = {
        str(linked / "src"): str(root / "src"),
        str(tmp_path / "short" / "sub"): str(root / "src" / "sub"),
        str(top / "out"): str(root / "out"),
        "..": str(root),
        "../../beside": str(top.parent / "beside"),
        "/usr/lib/x": "/usr/lib/x",
        "": "",
    }
    for repository_name in (top, linked):
        moved = moved_path(os.pathsep.join(moves), repository_name, root).split(os.pathsep)
        assert [os.path.normpath(path) if path else "" for path in moved] == list(moves.values())


def seen(monkeypatch: pytest.MonkeyPatch, *files: Path | str, in_worker: bool = False) -> None:
    """Lets a run have been seen in these files."""
    stacks = [((str(file), 1, "f"),) for file in files]
    log = SimpleNamespace(
        samples=[] if in_worker else [(0, 0, stack, 0) for stack in stacks],
        worker_samples=[(stack, 1) for stack in stacks] if in_worker else [],
        sources={},
    )
    monkeypatch.setattr(imports, "read_logs", lambda run: ([log], ()))


def test_the_working_copys_code_is_known_by_any_name(
    linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = linked.resolve()
    commit(top, "as it came", path="vendor/six.py")
    for text in ("before", "now"):
        commit(top, text, path="packages/net/net/model.py")
    git(top, "worktree", "add", "--quiet", "--detach", str(top / "inside"))  # as with TMPDIR=.
    (top / "inside" / "copied.py").symlink_to(top / "src" / "net.py")
    (top / "shared").mkdir()
    (top / "inside" / "shared").symlink_to(top / "shared")
    net, packages = f"{top}/src/net.py, of the working copy", top / ".venv" / "lib" / "site-packages"
    write(packages / "net" / "model.py", "now")
    write(packages / "six.py", "as it came")
    write(packages / "foreign" / "net" / "model.py", "now")
    write(tmp_path / "dist-packages" / "net" / "model.py", "a namesake's")
    for file, reason in {
        linked / "src" / "net.py": net,
        top / "inside" / "copied.py": net,
        top / "inside" / "src" / "net.py": "",
        top / "inside" / "shared" / "code.py": "",
        packages / "net.py": f"{packages}/net.py, an installed copy of what stands in the worktree",
        tmp_path / "dist-packages" / "train.py": f"{tmp_path}/dist-packages/train.py, an installed copy",
        packages / "net" / "model.py": f"{packages}/net/model.py, an installed copy",
        packages / "six.py": "",
        packages / "foreign" / "net" / "model.py": "",
        tmp_path / "dist-packages" / "net" / "model.py": "",
        packages / "gone" / "model.py": "",
        packages / "torch.py": "",
        packages / "src" / "other.py": "",
        tmp_path / "elsewhere.py": "",
        "<string>": "",
    }.items():
        for in_worker in (False, True):
            seen(monkeypatch, file, in_worker=in_worker)
            for name in (top, linked):
                said = why_same_code(
                    "gate", tmp_path, name, top / "inside" / "src", "main~1..main", ["shared"]
                )
                assert (f"used {reason}" in said) if reason else not said, file
                assert ("installed copy" not in said) or f"PYTHONPATH={top}" in said


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("pkg/models/net.py", "."),
        ("src/pkg/net.py", "src"),
        ("src/net.py", "src"),
        ("net.py", "."),
        ("packages/a/pkg/net.py", "packages/a"),
    ],
)
def test_code_of_the_working_copy_is_to_be_imported_from_where_it_is_a_package(
    linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, folder: str
) -> None:
    top = linked.resolve()
    for each in [top / file, *((top / file).parents)]:
        if each != top and each.name.startswith(("pkg", "models")):
            write(each / "__init__.py", "")
    write(top / file, "x = 1\n")
    git(top, "worktree", "add", "--quiet", "--detach", str(top / "inside"))
    seen(monkeypatch, top / file)
    said = why_same_code("gate", tmp_path, linked, top / "inside" / "src", "main~1..main")
    assert f"PYTHONPATH={top / folder} diagnose" in said


@pytest.mark.extended
def test_an_installed_copy_of_the_project_is_not_judged(linked: Path, tmp_path: Path) -> None:
    """As after `pip install .`: both worktrees would run the one that is installed."""
    installed = tmp_path / "site-packages"
    for top in (linked, installed):
        write(top / "net" / "__init__.py", WORK)
    write(
        linked / "scripts" / "train.py",
        f"import sys\nsys.path.append({str(installed)!r})\n{TRAINS}",
    )
    git(linked, "add", ".")
    git(linked, "commit", "--quiet", "--all", "--message", "a training")
    call = ("gate", "--ab", "HEAD..HEAD", "--steps", "60", "--warmup", "0", "--", "scripts/train.py")
    ended = run(sys.executable, "-c", BY_PATH, *call, cwd=linked)
    assert ended.code == 2, ended.stdout + ended.stderr
    assert f"used {installed}/net/__init__.py, an installed copy" in ended.stderr
    assert f"PYTHONPATH={linked.resolve()} diagnose gate" in ended.stderr


@pytest.mark.extended
def test_a_run_that_imports_the_working_copy_over_a_link_is_not_judged(linked: Path) -> None:
    """As with an editable installation that was made under the link's name."""
    write(linked / "src" / "net.py", WORK)
    write(
        linked / "train.py",
        f"import sys\nsys.path.insert(0, {str(linked / 'src')!r})\n{TRAINS}",
    )
    git(linked, "commit", "--quiet", "--all", "--message", "a training")
    call = ("gate", "--ab", "HEAD..HEAD", "--steps", "60", "--warmup", "0", "--", "train.py")
    ended = run(sys.executable, "-c", BY_PATH, *call, cwd=linked)
    assert ended.code == 2, ended.stdout + ended.stderr
    assert f"used {linked.resolve()}/src/net.py, of the working copy" in ended.stderr


def test_the_head_is_asked_for_its_code_as_the_base_is(
    linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        seen(monkeypatch, linked / "src" / "net.py" if side.label == "head" else side.root / "train.py")
        other = Side(label="", name="", root=tmp_path, command=("same.py",))
        return measured_stand_in(other, name, folder, plan)

    write(tmp_path / "same.py", stand_in(10))
    with pytest.raises(DiagnoseError, match="of the working copy"):
        compare_versions(request_in(linked, tmp_path), Plumbing(measure=measure))


# -- links


@pytest.fixture
def with_submodule(tmp_path: Path) -> Path:
    """A repository whose submodule `lib/kernels` moved on in the last commit; it is checked out."""
    other = repository(tmp_path / "other", "1", "2")
    top = repository(tmp_path / "repo", "print(1)")
    allow = ("-c", "protocol.file.allow=always")
    git(top, *allow, "submodule", "--quiet", "add", str(other), "lib/kernels")
    git(top / "lib" / "kernels", "checkout", "--quiet", "HEAD~1")
    commit(top, "print(2)")
    git(top / "lib" / "kernels", "checkout", "--quiet", "main")
    commit(top, "print(3)")
    return top


@pytest.mark.parametrize("link", ["lib/kernels", "lib/kernels/", "./lib/kernels", "lib"])
def test_a_linked_submodule_that_moved_on_is_said_to_be_the_same(with_submodule: Path, link: str) -> None:
    base, head = (git(with_submodule, "rev-parse", name) for name in ("HEAD~1", "HEAD"))
    (note,) = note_of_submodules(with_submodule, base, head, [link])
    assert note.startswith("lib/kernels: another commit in each version")
    assert note_of_submodules(with_submodule, head, head, [link]) == ()
    assert note_of_submodules(with_submodule, base, head, ["train.py"]) == ()
    assert note_of_submodules(with_submodule, base, head, []) == ()


def test_the_note_on_a_linked_submodule_is_in_the_result(with_submodule: Path, tmp_path: Path) -> None:
    write(with_submodule / "train.py", stand_in(10))
    git(with_submodule, "commit", "--quiet", "--all", "--message", "a training")
    git(with_submodule / "lib" / "kernels", "checkout", "--quiet", "HEAD~1")
    git(with_submodule, "commit", "--quiet", "--all", "--message", "back")
    request = replace(request_in(with_submodule, tmp_path), links=("lib/kernels",))
    found = compare_versions(request, Plumbing(measure=measured_stand_in))
    assert found.verdict is Verdict.PASS
    assert any("lib/kernels: another commit" in note for note in found.notes)


def test_a_link_that_a_version_has_its_own_of_is_refused(tmp_path: Path) -> None:
    top = repository(tmp_path / "repo")
    (top / "gone").symlink_to("nowhere")
    (top / "abroad").symlink_to(tmp_path)
    held = commit(top, "a file", path="data")
    git(top, "rm", "--quiet", "data", "gone", "abroad")
    commit(top, "print(1)")
    for path in ("data/x", "gone", "abroad/x"):
        write(top / path, "not git's")
    for link in ("data", "data/x", "gone", "abroad/x"):
        with pytest.raises(NotInThisVersion), worktrees(top, [held], [link]):
            pass
    assert git(top, "worktree", "list").count("\n") == 0
    assert not (tmp_path / "x").exists(), "nothing is put where a version's own link leads"


# -- what is left


def worktrees_of(top: Path) -> set[str]:
    lines = git(top, "worktree", "list", "--porcelain").splitlines()
    return {line.partition(" ")[2] for line in lines if line.startswith("worktree ")} - {str(top)}


@pytest.fixture
def with_unseen(tmp_path: Path) -> tuple[Path, str]:
    """A repository and a worktree of its user, on a disk that is not there at the moment."""
    top = repository(tmp_path / "repo", "print(1)")
    mine = tmp_path / "disk" / "mine"
    git(top, "worktree", "add", "--quiet", "--detach", str(mine))
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    return top, str(mine)


def test_a_worktree_of_the_users_that_cannot_be_seen_is_left(with_unseen: tuple[Path, str]) -> None:
    top, mine = with_unseen
    with worktrees(top, [git(top, "rev-parse", "HEAD")]):
        assert len(worktrees_of(top)) == 2
    assert worktrees_of(top) == {mine}


def test_what_a_killed_gate_left_is_tidied_and_nothing_else(
    with_unseen: tuple[Path, str], tmp_path: Path
) -> None:
    top, mine = with_unseen
    place, other = tmp_path / f"{PREFIX}a'[1] b", tmp_path / f"{PREFIX}other"
    for root in (place / "base", place / "head", other / "base"):
        git(top, "worktree", "add", "--quiet", "--detach", str(root))
    git(top, "worktree", "lock", str(place / "head"))  # as one that was killed while it was made
    records = str(top / ".git" / "worktrees")
    subprocess.run(["sh", "-c", TIDY, "sh", str(place), str(top), records], input=b"", check=False)
    assert not place.exists()
    assert worktrees_of(top) == {mine, str(other / "base")}


def test_what_a_power_cut_left_is_forgotten_after_a_day(
    with_unseen: tuple[Path, str], tmp_path: Path
) -> None:
    top, mine = with_unseen
    places = {age: tmp_path / f"{PREFIX}{age}" for age in ("new", "old", "seen")}
    for place in places.values():
        git(top, "worktree", "add", "--quiet", "--detach", str(place / place.name))
    for age in ("new", "old"):
        places[age].rename(tmp_path / f"gone-{age}")
    long_ago = time.time() - 2 * DEAD_AFTER_S
    for record in (top / ".git" / "worktrees").iterdir():
        if record.name != places["new"].name:
            os.utime(record / "gitdir", (long_ago, long_ago))
    with worktrees(top, [git(top, "rev-parse", "HEAD")]):
        pass
    left = {str(places[age] / places[age].name) for age in ("new", "seen")}
    assert worktrees_of(top) == {mine, *left}


def test_what_a_container_left_that_was_killed_is_removed_after_a_day_and_no_living_gates(
    with_unseen: tuple[Path, str], tmp_path: Path
) -> None:
    top, mine = with_unseen
    head, long_ago = git(top, "rev-parse", "HEAD"), time.time() - 2 * DEAD_AFTER_S
    dead = tmp_path / f"{PREFIX}dead"
    for name in ("base", "head"):
        git(top, "worktree", "add", "--quiet", "--detach", str(dead / name))
    (dead / LOCK).touch()
    with worktrees(top, [head]) as (living,):
        for record in (top / ".git" / "worktrees").iterdir():
            os.utime(record / "gitdir", (long_ago, long_ago))
        with worktrees(top, [head]) as (other,):
            assert worktrees_of(top) == {mine, str(living), str(other)}
        assert living.is_dir()
        assert not dead.exists()
    assert worktrees_of(top) == {mine}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    """Under nohup a terminal that is closed does not end the gate."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with sigterm_unwinds():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(SystemExit), sigterm_unwinds():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
