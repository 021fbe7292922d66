"""`diagnose patch`: kept settings as a change of the script, applied and run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.actions.gc_freeze import GcFreeze
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
