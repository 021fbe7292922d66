"""`diagnose patch`: kept settings as a change of the script, applied and run."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import diagnose
from diagnose.actions.ddp_bf16_hook import DdpBf16Hook
from diagnose.actions.ddp_fp16_hook import DdpFp16Hook
from diagnose.actions.ddp_fp16_scaled_hook import DdpFp16ScaledHook
from diagnose.actions.ddp_power_sgd_hook import DdpPowerSgdHook
from diagnose.actions.gc_freeze import GcFreeze
from diagnose.actions.no_sync import NoSync
from diagnose.cli.patch import patch as print_patch
from diagnose.core.errors import DiagnoseError
from diagnose.core.job import Job
from diagnose.core.parallel import Ddp
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Optimizer, Program
from diagnose.core.trial import Outcome, Safety, Trial, Tuning
from diagnose.launch.run_folder import write_manifest
from diagnose.report._patch import Patch, patch_of
from tests.profiles import PROFILE


def kept(action: str, **settings: str) -> Trial:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return Trial(action=action, safety=Safety.EXACT, outcome=Outcome.KEPT, reason="", settings=named)


def profile(
    script: Path, *trials: Trial, loader: int = 0, adamw: int = 0, ddp: int = 0, found: str = "AdamW"
) -> Profile:
    loaders = (Loader(num_workers=0, num_others=0, file=str(script), line=loader),) if loader else ()
    optimizer = Optimizer(kind=found, num_tensors=1, num_elements=1, file=str(script), line=adamw)
    return replace(
        PROFILE,
        run=replace(PROFILE.run, script=str(script)),
        program=Program(
            loaders=loaders,
            optimizers=(optimizer,) if adamw else (),
            ddp=tuple(Ddp(rank=rank, file=str(script), line=ddp) for rank in range(2 if ddp else 0)),
        ),
        tuning=Tuning(trials=trials),
    )


def changed(tmp_path: Path, source: str, *trials: Trial, **lines: int) -> tuple[str, Patch]:
    """The script after the diff was applied by git, and the patch."""
    script = tmp_path / "train.py"
    script.write_text(source, encoding="utf-8")
    patch = patch_of(profile(script, *trials, **lines), tmp_path)
    if patch.diff:
        subprocess.run(
            ["git", "apply", "-"], input=patch.diff.encode(), cwd=tmp_path, check=True, timeout=30
        )
    return script.read_text(encoding="utf-8"), patch


pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diffs")

WORKERS = kept("loader-workers", DataLoader__num_workers="2", DataLoader__persistent_workers="True")


def test_an_argument_is_added_and_nothing_else_changes(tmp_path):
    source = "loader = DataLoader(data, batch_size=4)  # the loader\n\n\nx = [1,2 ]\n"
    after, patch = changed(tmp_path, source, WORKERS, loader=1)
    assert after == (
        "loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)  # the loader\n"
        "\n\nx = [1,2 ]\n"
    )
    assert patch.left_out == ()


def test_what_a_fix_does_beside_its_setting_is_said(tmp_path):
    noted = kept("loader-workers", DataLoader__num_workers="2", note="the workers start in each epoch")
    after, patch = changed(tmp_path, "loader = DataLoader(data)\n", noted, loader=1)
    assert after == "loader = DataLoader(data, num_workers=2)\n"
    assert patch.left_out == ("loader-workers: the workers start in each epoch.",)


def test_a_longer_queue_is_only_written_where_there_are_workers(tmp_path):
    deeper = kept("loader-prefetch", DataLoader__prefetch_factor="8")
    source = "loader = DataLoader(data)\n"
    after, patch = changed(tmp_path, source, deeper, loader=1)
    assert (after, patch.left_out) == (
        source,
        ("DataLoader.prefetch_factor = 8: torch refuses it without workers.",),
    )
    after, _ = changed(tmp_path, source, deeper, WORKERS, loader=1)
    assert "prefetch_factor=8" in after


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


def test_an_argument_that_is_there_gets_the_new_value(tmp_path):
    source = "loader = torch.utils.data.DataLoader(data, num_workers=args.workers)\n"
    after, _ = changed(tmp_path, source, WORKERS, loader=1)
    assert after == ("loader = torch.utils.data.DataLoader(data, num_workers=2, persistent_workers=True)\n")


def test_a_call_over_several_lines_keeps_its_form(tmp_path):
    source = "loader = DataLoader(\n    data,\n    batch_size=4,\n)\n"
    after, _ = changed(tmp_path, source, WORKERS, loader=1)
    assert after == (
        "loader = DataLoader(\n    data,\n    batch_size=4,\n    num_workers=2,\n"
        "    persistent_workers=True,\n)\n"
    )


@pytest.mark.parametrize("comma", [",", ""])
def test_comments_stay_with_their_arguments(tmp_path, comma):
    source = (
        "import torch\n"
        "opt = torch.optim.AdamW(\n"
        "    params,  # weights\n"
        f"    lr=1e-3{comma}  # peak\n"
        "    # betas as they are\n"
        ")\n"
    )
    after, _ = changed(tmp_path, source, kept("fused-optimizer", AdamW__fused="True"), adamw=2)
    assert after == (
        "import torch\n"
        "opt = torch.optim.AdamW(\n"
        "    params,  # weights\n"
        "    lr=1e-3,  # peak\n"
        f"    fused=True{comma}\n"
        "    # betas as they are\n"
        ")\n"
    )


def test_only_the_call_on_the_line_is_changed(tmp_path):
    source = "a = DataLoader(one)\nb = DataLoader(two)\n"
    after, _ = changed(tmp_path, source, WORKERS, loader=2)
    assert after.splitlines()[0] == "a = DataLoader(one)"
    assert "num_workers=2" in after.splitlines()[1]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_form_feeds_are_left_as_they_are(tmp_path, end):
    source = f"x = 1{end}\f{end}loader = DataLoader(data){end}y = 2"
    script = tmp_path / "train.py"
    script.write_bytes(source.encode())
    ran = {str(script): script.read_text(encoding="utf-8")}
    patch = patch_of(profile(script, WORKERS, loader=3), tmp_path, ran)
    apply = ["git", "-c", "core.autocrlf=false", "apply", "-"]
    subprocess.run(apply, input=patch.diff.encode(), cwd=tmp_path, check=True, timeout=30)
    new = source.replace("(data)", "(data, num_workers=2, persistent_workers=True)")
    assert script.read_bytes() == new.encode()


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


def test_what_has_to_stand_right_before_the_loop_is_no_line_below_the_imports(tmp_path):
    trial = kept("gc-freeze", **GcFreeze().settings(Job(), None))
    _, patch = changed(tmp_path, "import torch\n\nmodel = make()\n", trial)
    assert patch.diff == ""
    assert "gc.freeze()" in patch.left_out[0] and "by hand" in patch.left_out[0]


def test_an_optimizer_is_found_by_its_class(tmp_path):
    source = "import torch\nopt = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
    after, _ = changed(tmp_path, source, kept("fused-optimizer", AdamW__fused="True"), adamw=2)
    assert "AdamW(model.parameters(), lr=1e-3, fused=True)" in after


def test_what_was_imported_under_another_name_is_found_by_the_class_too(tmp_path):
    source = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "net = DDP(net, device_ids=None, find_unused_parameters=True)\n"
    )
    trial = kept(
        "find-unused-off",
        DistributedDataParallel__find_unused_parameters="False",
        DistributedDataParallel__bucket_cap_mb="50",
    )
    after, patch = changed(tmp_path, source, trial, ddp=2)
    assert after.splitlines()[1] == (
        "net = DDP(net, device_ids=None, find_unused_parameters=False, bucket_cap_mb=50)"
    )
    assert patch.left_out == ()


def test_a_statement_goes_below_the_imports_and_brings_its_own(tmp_path):
    source = '"""Trains."""\n\nimport os\nfrom torch import nn\n\nprint(os.name)\n'
    after, _ = changed(tmp_path, source, kept("set-threads", statement="torch.set_num_threads(1)"))
    assert after == (
        '"""Trains."""\n\nimport os\nfrom torch import nn\nimport torch\ntorch.set_num_threads(1)\n'
        "\nprint(os.name)\n"
    )


@pytest.mark.parametrize(
    ("own", "statement", "name"),
    [
        ("torch.set_num_threads(8)", "torch.set_num_threads(1)", "set_num_threads"),
        (
            "torch.backends.cudnn.benchmark = False",
            "torch.backends.cudnn.benchmark = True",
            "benchmark",
        ),
        (
            "torch.backends.cuda.enable_flash_sdp(False)",
            "torch.backends.cuda.enable_flash_sdp(True)",
            "enable_flash_sdp",
        ),
    ],
)
def test_what_the_script_sets_itself_later_is_not_set_above_it(tmp_path, own, statement, name):
    source = f"import torch\n\n\ndef main():\n    {own}\n"
    after, patch = changed(tmp_path, source, kept("the-fix", statement=statement))
    assert (after, patch.diff) == (source, "")
    assert patch.left_out == (f"train.py:5: {name} is set there; set it to {statement} there.",)


def test_torchs_own_grouping_makes_room_for_the_fused_step(tmp_path):
    source = (
        "import torch\n"
        "first = torch.optim.AdamW(model.parameters(), foreach=True, lr=1e-3)\n"
        "second = torch.optim.SGD(\n    model.parameters(),\n    lr=1e-3,\n    foreach=True,\n)\n"
    )
    fused = kept("fused-optimizer", AdamW__fused="True")
    after, _ = changed(tmp_path, source, fused, adamw=2)
    assert after.splitlines()[1] == "first = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)"
    last = kept("fused-optimizer", SGD__fused="True")
    after, _ = changed(tmp_path, source, last, adamw=3, found="SGD")
    assert after.endswith("SGD(\n    model.parameters(),\n    lr=1e-3,\n    fused=True,\n)\n")


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


def test_where_nothing_can_be_written_git_is_given_no_empty_diff(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr("diagnose.store.runs.resolve_run", lambda run, root: tmp_path)
    monkeypatch.setattr(
        "diagnose.analysis.profile.load_profile", lambda run: profile(script, kept("dataset-cache"))
    )
    with pytest.raises(
        DiagnoseError, match=r"nothing to write into the script\.\ndataset-cache has no setting"
    ):
        print_patch("slow")


def test_a_run_of_another_folder_changes_the_script_there(tmp_path, monkeypatch, capsys):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text("import torch\n", encoding="utf-8")
    write_manifest(tmp_path / "there", {"cwd": str(tmp_path / "there")})
    threads = kept("set-threads", statement="torch.set_num_threads(1)")
    monkeypatch.setattr(
        "diagnose.analysis.profile.load_profile", lambda run: profile(Path("train.py"), threads)
    )
    monkeypatch.chdir(tmp_path / "here")
    print_patch(str(tmp_path / "there"))
    printed = capsys.readouterr()
    assert printed.out.splitlines()[:2] == ["--- a/there/train.py", "+++ b/there/train.py"]
    assert f"git -C {tmp_path} apply" in printed.err
    subprocess.run(["git", "-C", str(tmp_path), "apply"], input=printed.out, text=True, check=True)
    assert "torch.set_num_threads(1)" in (tmp_path / "there" / "train.py").read_text(encoding="utf-8")
    (tmp_path / "there" / "train.py").unlink()
    with pytest.raises(DiagnoseError, match=r"the script's file is not known"):
        print_patch(str(tmp_path / "there"))


def test_the_changed_script_runs_and_computes_the_same(tmp_path):
    source = (
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = TensorDataset(torch.randn(32, 4))\n"
        "if __name__ == '__main__':\n"
        "    for (x,) in DataLoader(\n"
        "        data, batch_size=8, shuffle=True\n"
        "    ):\n"
        "        opt.zero_grad(); model(x).sum().backward(); opt.step()\n"
        "    print(model.weight.tolist())\n"
    )
    fused = kept("fused-optimizer", SGD__fused="True")
    script = tmp_path / "train.py"

    def output() -> str:
        return subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=100
        ).stdout

    script.write_text(source, encoding="utf-8")
    before = output()
    patch = patch_of(profile(script, WORKERS, fused, loader=8, adamw=5, found="SGD"), tmp_path)
    subprocess.run(["git", "apply", "-"], input=patch.diff.encode(), cwd=tmp_path, check=True, timeout=30)
    assert "num_workers=2" in script.read_text(encoding="utf-8")
    assert "fused=True" in script.read_text(encoding="utf-8")
    assert output() == before
