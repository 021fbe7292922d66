"""`diagnose run` runs the same program as `python`: output, exit code, arguments, environment."""

from __future__ import annotations

import json
import os
import sys
import zipapp

import pytest

from diagnose.launch.command import Target
from tests.mixing import mostly_extended
from tests.running import BY_PATH, DIAGNOSE, PLAIN, REPOSITORY, only_run, run, write

PROGRAMS = {
    "returns": "print('out'); import sys; print('err', file=sys.stderr)",
    "exits 3": "import sys; sys.exit(3)",
    "exits with a text": "import sys; sys.exit('gave up')",
    "exits from another function": "import atexit; atexit.register(print, 'bye')\nraise SystemExit(4)",
    "raises": "def fail():\n    raise ValueError('no such thing')\nfail()\n",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "has a syntax error": "if True print()\n",
    "ends at once": "import os; print('out', flush=True); os._exit(7)",
    "crashes": "import ctypes; print('out', flush=True); ctypes.string_at(0)",
    "is killed": "import os; print('out', flush=True); os.kill(os.getpid(), 9)",
    "aborts": "import os; print('out', flush=True); os.abort()",
    "reads stdin": "print(input() + '!'); print(input())",
    "leaves a thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
}


@pytest.mark.parametrize(
    "source",
    mostly_extended(
        PROGRAMS,
        "returns",
        "exits 3",
        "raises",
        "ends at once",
        "is killed",
        "reads stdin",
        "leaves a thread",
    ),
)
def test_a_script_prints_and_ends_as_under_plain_python(tmp_path, source):
    script = write(tmp_path / "script.py", source)
    plain = run(*PLAIN, script.name, cwd=tmp_path, stdin="one\ntwo\n")
    ours = run(*DIAGNOSE, script.name, cwd=tmp_path, stdin="one\ntwo\n")
    assert (ours.code, ours.stdout) == (plain.code, plain.stdout)
    assert ours.stderr.startswith(plain.stderr), "every byte of the script's own, first"
    block = ours.stderr[len(plain.stderr) :]
    assert block.startswith("\ndiagnose: "), "then a blank line, then we"
    assert "bug of ours" not in block
    recorded = json.loads((only_run(tmp_path) / "run.json").read_text())
    ended_by = {"exit_code": plain.code if plain.code >= 0 else None}
    ended_by["signal"] = -plain.code if plain.code < 0 else None
    assert {key: recorded[key] for key in ended_by} == ended_by


SURROUNDINGS = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv,
    "path": [part for part in sys.path if "boot" not in part],
    "name": __name__,
    "file": globals().get("__file__"),
    "flags": str(sys.flags),
    "warnings": sys.warnoptions,
    "signals": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "files": sorted(os.listdir("/proc/self/fd")),
    "terminal": [os.isatty(number) for number in (0, 1, 2)],
    "group": os.getpgid(0) == os.getpgid(os.getppid()),
    "unbuffered": sys.stdout.write_through,
}))
"""


@pytest.mark.parametrize(
    "flags, arguments",
    [
        ([], ["job.py"]),
        ([], ["job.py", "--steps", "3", "-m", "--help", "--", "-x", "", "a b", "--", "--quiet"]),
        (["-O", "-u", "-B", "-X", "dev", "-W", "error::ImportWarning"], ["job.py"]),
        (["-uB"], ["job.py"]),
        ([], ["-m", "package.job", "--lr", "1"]),
        (["-P"] if sys.version_info >= (3, 11) else ["-s"], ["job.py"]),
        ([], ["package", "x"]),
        ([], ["package.pyz", "x"]),
        ([], ["./größe 1/jöb 2.py", "ü"]),
    ],
    ids=["script", "arguments", "flags", "flag cluster", "module", "safe path", "folder", "zip", "unicode"],
)
def test_a_script_finds_itself_as_under_plain_python(tmp_path, flags, arguments):
    for path in (
        "job.py",
        "package/__init__.py",
        "package/job.py",
        "package/__main__.py",
        "größe 1/jöb 2.py",
    ):
        write(tmp_path / path, "" if path.endswith("__init__.py") else SURROUNDINGS)
    zipapp.create_archive(tmp_path / "package", tmp_path / "package.pyz")
    plain = run(sys.executable, *flags, *arguments, cwd=tmp_path)
    ours = run(sys.executable, *flags, "-m", "diagnose", "run", *arguments, cwd=tmp_path)
    assert plain.code == 0, plain.stderr
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


def test_only_our_own_variables_are_added_to_the_environment(tmp_path):
    write(tmp_path / "job.py", "import json, os; print(json.dumps(dict(os.environ)))")
    plain = json.loads(run(*PLAIN, "job.py", cwd=tmp_path, OMP_NUM_THREADS=None).stdout)
    ours = json.loads(run(*DIAGNOSE, "--warmup", "2", "job.py", cwd=tmp_path, OMP_NUM_THREADS=None).stdout)
    assert {name for name in ours if ours[name] != plain.get(name)} == {
        "PYTHONPATH",
        "DIAGNOSE_RUN",
        "DIAGNOSE_SUPERVISOR",
        "DIAGNOSE_WARMUP",
    }
    assert set(plain) <= set(ours)
    assert ours["DIAGNOSE_RUN"] == str(only_run(tmp_path))
    assert ours["PYTHONPATH"].split(os.pathsep)[1:] == [plain["PYTHONPATH"]]


def test_an_empty_pythonpath_does_not_bring_in_the_current_folder(tmp_path):
    write(tmp_path / "jobs" / "job.py", "import sys; print('\\n'.join(sys.path))")
    ours = run(sys.executable, "-c", BY_PATH, "run", "jobs/job.py", cwd=tmp_path, PYTHONPATH="")
    assert not {"", str(tmp_path)} & set(ours.stdout.splitlines())
    assert str(tmp_path / "jobs") in ours.stdout.splitlines()


def test_an_open_file_is_passed_on(tmp_path):
    write(tmp_path / "job.py", "print(open(3).read())")
    write(tmp_path / "data.txt", "handed over")
    ours = run("bash", "-c", f"{' '.join(DIAGNOSE)} job.py 3<data.txt", cwd=tmp_path)
    assert ours.stdout == "handed over\n"


def test_nobody_reading_stdout_ends_the_script_as_under_plain_python(tmp_path):
    write(tmp_path / "job.py", "for i in range(100_000): print(i)")
    line = "set -o pipefail; {} job.py | head -1"
    plain = run("bash", "-c", line.format(sys.executable), cwd=tmp_path)
    ours = run("bash", "-c", line.format(" ".join(DIAGNOSE)), cwd=tmp_path)
    assert (ours.code, ours.stdout) == (plain.code, "0\n")
    assert ours.stderr.startswith(plain.stderr)
    assert ours.stderr[len(plain.stderr) :].startswith("\ndiagnose: script ")


@pytest.mark.parametrize(
    "where", ["2>&-", "2>/dev/full", "2>&1 >/dev/null | true", "2>/dev/null 0<&- 1>&-"]
)
def test_nobody_to_listen_to_our_report_does_not_change_the_exit_code(tmp_path, where):
    write(tmp_path / "job.py", "import time; time.sleep(0.1); raise SystemExit(5)")
    command = f"set -o pipefail; {' '.join(DIAGNOSE)} --json report.json job.py {where}"
    ours = run("bash", "-c", command, cwd=tmp_path)
    assert ours.code == 5
    assert json.loads((tmp_path / "report.json").read_text())["run"]["exit_code"] == 5
    assert [path.name for path in only_run(tmp_path).iterdir()] == ["run.json"], "no traceback of ours"


def test_nothing_heavy_is_imported_while_the_script_runs(tmp_path):
    libraries = "{word for word in ('pandas', 'torch', 'dash') if f'/{word}/' in maps}"
    write(
        tmp_path / "job.py",
        f"import os, time; time.sleep(2); maps = open(f'/proc/{{os.getppid()}}/maps').read()\n"
        f"print('numpy' in maps, {libraries})",
    )
    # The analysis, so that its user need not wait for it in the end, and nothing that it does not need.
    assert run(*DIAGNOSE, "job.py", cwd=tmp_path).stdout == "True set()\n"
    assert run(*DIAGNOSE, "--quiet", "job.py", cwd=tmp_path).stdout == "False set()\n"


def test_a_missing_script_is_named_with_the_one_that_was_meant(tmp_path):
    write(tmp_path / "jobs" / "train.py", "")
    ours = run(*DIAGNOSE, "jobs/trian.py", cwd=tmp_path)
    assert (ours.code, ours.stdout) == (2, "")
    assert ours.stderr == (
        "diagnose: cannot open 'jobs/trian.py': no such file. Did you mean 'jobs/train.py'?\n"
    )
    assert not (tmp_path / ".diagnose").exists(), "nothing was started"


NO_NAMES = ("", " ", ".", "..", "../x", "a/b", "-x", "<img>", "größe 1", "a\nb", "x" * 129)
NO_NAME = (
    "cannot name a run: use up to 128 letters, digits, '_', '.' and '-', "
    "beginning with a letter or a digit."
)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere/at/all.py"], "diagnose: cannot open 'nowhere/at/all.py': no such file.\n"),
        (["python", "job.py", "--lr", "1"], "diagnose: leave 'python' out: diagnose run job.py --lr 1\n"),
        ([sys.executable, "job.py"], f"diagnose: leave {sys.executable!r} out: diagnose run job.py\n"),
        (
            ["torchrun", "job.py"],
            "diagnose: cannot open 'torchrun': no such file. "
            "Put it in front: torchrun ... -m diagnose run SCRIPT\n",
        ),
        (
            ["jobs.train"],
            "diagnose: cannot open 'jobs.train': no such file. "
            "Did you mean 'diagnose run -m jobs.train'?\n",
        ),
        (
            ["job.ipynb"],
            "diagnose: 'job.ipynb' is a notebook: in it, diagnose.attach('runs/first'), train, "
            "profile = diagnose.detach(); then: diagnose report runs/first\n",
        ),
        (
            ["--json", "no/out.json", "job.py"],
            "diagnose: cannot write --json no/out.json: there is no folder {cwd}/no.\n",
        ),
        (["--html", ".", "job.py"], "diagnose: cannot write --html .: it is a folder.\n"),
        *((["--name", name, "job.py"], f"{name[:60]!r} {NO_NAME}\n") for name in NO_NAMES),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_line_before_anything_starts(tmp_path, arguments, message):
    for name in ("job.py", "job.ipynb", "jobs/train.py"):
        write(tmp_path / name, "print('started')")
    ours = run(*DIAGNOSE, *arguments, cwd=tmp_path)
    assert (ours.code, ours.stdout, ours.stderr) == (2, "", message.format(cwd=tmp_path))


@pytest.mark.parametrize("namesake", ["diagnose.py", "diagnose/__init__.py"])
def test_a_module_of_our_name_beside_the_script_is_named(tmp_path, monkeypatch, namesake):
    theirs = write(tmp_path / "job" / namesake, "")
    named = theirs if theirs.name == "diagnose.py" else theirs.parent
    write(tmp_path / "job" / "train.py", "")
    monkeypatch.chdir(tmp_path)
    said = Target(script="job/train.py").namesake()
    assert said is not None and said.startswith(f"{named} has our package's name: ")
    assert Target(script="train", is_module=True).namesake() is None
    write(tmp_path / "other" / "train.py", "")
    assert Target(script="other/train.py").namesake() is None
    monkeypatch.chdir(tmp_path / "job")
    for script in (Target(script="train", is_module=True), Target(script="-")):
        said = script.namesake()
        assert said is not None and said.startswith(f"{named.name} has our package's name: ")
    ours = run(*DIAGNOSE, "job/train.py", cwd=tmp_path)
    assert ours.code == 0 and "has our package's name" in ours.stderr, "told, and run all the same"


def test_our_own_checkout_and_a_script_that_has_our_name_itself_are_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert Target(script="examples.ddp", is_module=True).namesake() is None
    assert Target(script="README.md").namesake() is None
    assert Target(script=str(write(tmp_path / "diagnose.py", ""))).namesake() is None


@pytest.mark.parametrize(
    "arguments", [["--stpes", "5", "job.py"], ["-x", "job.py"], ["--steps", "0", "job.py"], []]
)
def test_a_wrong_option_is_an_error_and_never_a_script(tmp_path, arguments):
    write(tmp_path / "job.py", "print('started')")
    ours = run(*DIAGNOSE, *arguments, cwd=tmp_path)
    assert (ours.code, ours.stdout) == (2, "")
    assert "Try 'diagnose run -h' for help." in ours.stderr


def test_quiet_says_nothing_and_still_writes_the_report(tmp_path):
    write(tmp_path / "job.py", "print('out')")
    ours = run(*DIAGNOSE, "--quiet", "--json", "out.json", "--html", "out.html", "job.py", cwd=tmp_path)
    assert (ours.code, ours.stdout, ours.stderr) == (0, "out\n", "")
    assert json.loads((tmp_path / "out.json").read_text())["status"] == "no_steps"
    assert "</html>" in (tmp_path / "out.html").read_text()


def test_a_report_that_cannot_be_written_is_one_line(tmp_path):
    write(tmp_path / "job.py", "raise SystemExit(6)")
    ours = run(*DIAGNOSE, "--quiet", "--json", "/dev/full", "job.py", cwd=tmp_path)
    assert ours.code == 6
    assert ours.stderr == "diagnose: /dev/full could not be written: No space left on device.\n"


def test_a_flag_that_keeps_us_out_is_said(tmp_path):
    write(tmp_path / "job.py", "print('out')")
    ours = run(sys.executable, "-I", "-c", BY_PATH, "run", "--quiet", "job.py", cwd=tmp_path)
    assert (ours.code, ours.stdout) == (0, "out\n")
    assert ours.stderr == (
        "diagnose: python -I keeps diagnose out of the script; nothing is measured. "
        "Leave the flag out, or call diagnose.attach() in the script.\n"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(tmp_path, arguments):
    ours = run(sys.executable, "-X", "importtime", "-m", "diagnose", *arguments, cwd=tmp_path)
    assert ours.code == 0
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in ours.stderr.splitlines()}
    assert "typer" in modules
    assert not modules & {"torch", "numpy", "pandas", "dash", "plotly", "rich"}
