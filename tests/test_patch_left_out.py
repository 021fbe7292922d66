"""What `diagnose patch` leaves to the user, with the reason."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

import diagnose
from diagnose.actions.ddp_bf16_hook import DdpBf16Hook
from diagnose.actions.ddp_fp16_hook import DdpFp16Hook
from diagnose.actions.ddp_fp16_scaled_hook import DdpFp16ScaledHook
from diagnose.actions.ddp_power_sgd_hook import DdpPowerSgdHook
from diagnose.actions.no_sync import NoSync
from diagnose.core.job import Job
from diagnose.core.program import Loader
from diagnose.core.trial import Tuning
from diagnose.report._patch import Patch, patch_of
from tests.test_patch import WORKERS, changed, kept, profile

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diffs")


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (1, "makes other loaders, too, which were not tried"),
        (None, "may make other loaders, too: nobody has counted them"),
    ],
)
def test_a_line_that_makes_other_loaders_too_is_left_alone(tmp_path, others, reason):
    script = tmp_path / "train.py"
    script.write_text("loader = DataLoader(data)\n", encoding="utf-8")
    made = profile(script, WORKERS, loader=1)
    loaders = (replace(made.program.loaders[0], num_others=others),)
    patch = patch_of(replace(made, program=replace(made.program, loaders=loaders)), tmp_path)
    assert patch.diff == ""
    assert patch.left_out == (
        f"DataLoader.num_workers = 2: train.py:1 {reason}.",
        f"DataLoader.persistent_workers = True: train.py:1 {reason}.",
    )


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("num_workers=4", "8"),
        ("num_workers=args.workers", "8 if args.workers else None"),
        ("num_workers=4 if train else 0", "8 if (4 if train else 0) else None"),
        ("4, True, None, None, workers", "8 if workers else None"),
        ("num_workers=count()", ""),
    ],
)
def test_a_longer_queue_is_asked_for_only_where_another_run_has_workers_too(tmp_path, given, written):
    script = tmp_path / "train.py"
    source = f"loader = DataLoader(data, {given})\n"
    deeper = kept("loader-prefetch", DataLoader__prefetch_factor="8")
    script.write_text(source, encoding="utf-8")
    ran = profile(script, deeper, loader=1)
    loaders = (replace(ran.program.loaders[0], num_workers=4),)
    patch = patch_of(replace(ran, program=replace(ran.program, loaders=loaders)), tmp_path)
    changes = [line for line in patch.diff.splitlines()[2:] if line.startswith("+")]
    assert changes == ([f"+{source[:-2]}, prefetch_factor={written})"] if written else [])
    assert patch.left_out == (
        ()
        if written
        else ("train.py:1: prefetch_factor=8 needs num_workers, which is not simply a number there.",)
    )


HELPER = """
def make(rows, train):
    return DataLoader(rows, shuffle=train)

train = make(some, True)
"""
METHOD = """
class Trainer:
    def make(self, rows):
        return DataLoader(rows)

    def fit(self):
        return self.make(self.some)
"""


@pytest.mark.parametrize(
    ("source", "more", "name"),
    [
        (HELPER, "if args.test:\n    test = make(others, False)\n", "make"),
        (METHOD, "\n    def test(self):\n        return self.make(self.others)\n", "self.make"),
    ],
)
def test_a_function_that_may_make_a_loader_in_another_run_is_left_alone(tmp_path, source, more, name):
    line = source.splitlines().index(next(each for each in source.splitlines() if "DataLoader" in each)) + 1
    after, patch = changed(tmp_path, source + more, WORKERS, loader=line)
    assert (after, patch.diff) == (source + more, "")
    assert patch.left_out == (
        f"train.py:{line}: {name}() is called in several places; which one needs num_workers=2,"
        " persistent_workers=True?",
    )
    others = "model.make()\nmodel.make()\nprint(len(some))\nprint(len(some))\n"
    after, patch = changed(tmp_path, source + "\n" + others, WORKERS, loader=line)
    assert "num_workers=2" in after.splitlines()[line - 1]
    assert patch.left_out == ()


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)

def make(rows, train):
    return DataLoader(rows, batch_size=8, shuffle=train, num_workers=1 if train else 0)

loaders = {}
for name in ("train", "held_out")[: 1 + (sys.argv[1:] == ["--evaluate"])]:
    loaders[name] = make(TensorDataset(torch.randn(32, 4)), name == "train")
for (x,) in loaders["train"]:
    opt.zero_grad(); model(x).sum().backward(); opt.step()
with torch.no_grad():
    print([float(model(x).sum()) for (x,) in loaders.get("held_out", ())])
"""


@pytest.mark.extended
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_longer_queue_is_not_written_where_the_evaluation_has_no_workers(tmp_path, evaluates):
    """torch refuses `prefetch_factor` without workers: the changed script would raise an exception."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    argv = [str(script), *(["--evaluate"] if evaluates else [])]
    diagnose.attach(tmp_path / "run")
    before, sys.argv = sys.argv, argv
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
        ran = diagnose.detach()
    deeper = kept("loader-prefetch", DataLoader__prefetch_factor="8")
    patch = patch_of(replace(ran, tuning=Tuning(trials=(deeper,))), tmp_path)
    if patch.diff:
        subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=tmp_path, check=True)
    assert ("prefetch_factor=8" in script.read_text(encoding="utf-8")) is not evaluates
    assert ("which were not tried" in "".join(patch.left_out)) is evaluates
    for more in ([], ["--evaluate"]):  # also where this run has not shown that the line makes others
        subprocess.run([sys.executable, str(script), *more], check=True, timeout=100)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"# -*- coding: latin-1 -*-\nname = '\xe9'\nloader = DataLoader(data)\n", "it is not UTF-8"),
        (b"print 'of old'\n\nloader = DataLoader(data)\n", "it cannot be parsed"),
        (b"\n\nval, train = DataLoader(a), DataLoader(b)\n", "2 calls of DataLoader stand there"),
    ],
)
def test_what_cannot_be_changed_with_certainty_is_left_out_with_the_reason(tmp_path, source, reason):
    script = tmp_path / "train.py"
    script.write_bytes(source)
    patch = patch_of(profile(script, WORKERS, loader=3), tmp_path)
    assert patch.diff == ""
    assert len(patch.left_out) == 1 and reason in patch.left_out[0]


def test_of_several_calls_none_is_changed_and_all_are_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("a = DataLoader(one)\nb = DataLoader(two)\n", encoding="utf-8")
    two = profile(script, WORKERS, loader=1)
    other = Loader(num_workers=0, num_others=0, iterable=True, file=str(script), line=2)
    program = replace(two.program, loaders=(*two.program.loaders, other))
    assert patch_of(replace(two, program=program), tmp_path) == Patch(
        diff="",
        folder=tmp_path,
        left_out=(
            "DataLoader.num_workers = 2: which DataLoader needs it is not known (train.py:1, train.py:2).",
            "DataLoader.persistent_workers = True: which DataLoader needs it is not known"
            " (train.py:1, train.py:2).",
        ),
    )


@pytest.mark.parametrize(
    "action", [NoSync(), DdpBf16Hook(), DdpFp16Hook(), DdpFp16ScaledHook(), DdpPowerSgdHook()]
)
def test_what_uses_a_name_of_the_script_is_left_to_the_user(tmp_path, action):
    source = "import torch\nmodel = torch.nn.Linear(2, 2)\n"
    settings = action.settings(Job(device="cuda"), None)
    after, patch = changed(tmp_path, source, replace(kept("the-fix"), settings=settings))
    assert after == source
    (line,) = settings.values()
    assert patch.left_out == (f"the-fix has to be written by hand: {line}",)


def test_where_torchs_own_hook_refuses_to_run_nobody_is_told_to_write_it(tmp_path):
    """It wants NCCL, which no CPU has."""
    settings = DdpBf16Hook().settings(Job(device="cpu"), None)
    _, patch = changed(tmp_path, "x = 1\n", replace(kept("ddp-bf16-hook"), settings=settings))
    assert patch.left_out == ("ddp-bf16-hook has no setting in the script; use diagnose run --apply.",)


def test_arguments_in_a_mapping_are_left_to_the_user(tmp_path):
    source = "loader = DataLoader(data, **options)\n"
    after, patch = changed(tmp_path, source, WORKERS, loader=1)
    assert after == source
    assert patch.left_out == (
        "train.py:1: the call of DataLoader takes ** of a mapping;"
        " set num_workers, persistent_workers in there.",
    )


def test_arguments_in_a_list_are_left_to_the_user(tmp_path):
    source = "loader = DataLoader(data, *options)\n"
    after, patch = changed(tmp_path, source, WORKERS, loader=1)
    assert after == source
    assert patch.left_out == (
        "train.py:1: the call of DataLoader takes * of a list;"
        " set num_workers, persistent_workers by hand.",
    )


def test_a_value_by_position_is_not_given_twice(tmp_path):
    source = "loader = DataLoader(data, 4, True, None, None, 0)\n"
    after, patch = changed(tmp_path, source, WORKERS, loader=1)
    assert after == source
    assert "num_workers is given by position" in patch.left_out[0]


def test_a_line_without_the_call_is_named(tmp_path):
    after, patch = changed(tmp_path, "x = 1\ny = 2\n", WORKERS, loader=2)
    assert after == "x = 1\ny = 2\n"
    assert "train.py:2: no call of DataLoader" in patch.left_out[0]


def test_a_script_that_was_edited_since_is_left_alone(tmp_path):
    """The line is another by now, and may hold another call of the name."""
    script, ran = tmp_path / "train.py", "loader = DataLoader(rows)\n"
    script.write_text("other = DataLoader(more)\n" + ran)
    ran_profile = profile(script, WORKERS, loader=1)
    assert patch_of(ran_profile, tmp_path, {str(script): ran}) == Patch(
        diff="", folder=tmp_path, left_out=("train.py: it was edited since; tune it again.",)
    )
    script.write_text(ran)
    assert "num_workers=2" in patch_of(ran_profile, tmp_path, {str(script): ran}).diff


def test_a_fix_without_a_setting_is_named(tmp_path):
    _, patch = changed(tmp_path, "x = 1\n", kept("channels-last"))
    assert patch.left_out == ("channels-last has no setting in the script; use diagnose run --apply.",)
