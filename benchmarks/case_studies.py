"""What is found in scripts of other projects, and whether the advice was right, as markdown.

    python benchmarks/case_studies.py --sources SOURCES [--pairs N] [--only NAME]

Each script runs unmodified under `diagnose run`. Where a fix by hand is known, a copy with that fix runs by
turns with the unmodified one, and the gain that was predicted stands beside the one that was measured.
`foreign/README.md` says where the sources come from.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from textwrap import fill

from compatibility import heading
from compatibility_cases import EXAMPLES, FOREIGN, NANOGPT, PICTURES, ROOT, make_tokens

from diagnose.analysis.profile import load_profile
from diagnose.core.profile import Profile
from diagnose.core.units import format_gain, format_ms
from diagnose.rules import diagnosed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A fix by hand.

    Attributes:
        rule: The finding that asks for it.
        action: What does the same to a running job; its gain is the predicted one.
        words: What is changed.
        file: The file, from the script's folder.
        old: Text that stands there once.
        new: What takes its place.
    """

    rule: str
    action: str
    words: str
    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One script.

    Attributes:
        name: What the page calls it.
        folder: Its folder, from `--sources`, or absolute. All of it is copied.
        script: From that folder.
        reader: What somebody who knows PyTorch says of the script after reading it, before any run of it.
        prepare: Makes in the copy what the script reads.
        fix: What to try; `None` where the script is only looked at.
    """

    name: str
    folder: str
    script: str
    arguments: str
    reader: str
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    fix: Fix | None = None


STUDIES = (
    Study(
        name="nanoGPT train.py",
        folder=NANOGPT,
        script="train.py",
        # The README's command for a machine without a GPU, shorter, on tokens made on the spot.
        arguments="--dataset=toy --device=cpu --compile=False --eval_iters=20 --log_interval=1 "
        "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --lr_decay_iters=2000 "
        "--dropout=0.0 --gradient_accumulation_steps=1 --max_iters=120",
        reader="""
        `configure_optimizers` asks for the fused AdamW on CUDA only, so on a CPU AdamW goes through
        some fifty tensors one by one. `get_batch` takes twelve slices of a memory map, next to nothing.
        The loss is read in each step, as `--log_interval=1` wants it; on a CPU that waits for nothing.
        The rest is the model.""",
        prepare=make_tokens,
        fix=Fix(
            rule="slow-optimizer",
            action="fused-optimizer",
            words="the fused AdamW also on a CPU",
            file="model.py",
            old="use_fused = fused_available and device_type == 'cuda'",
            new="use_fused = fused_available",
        ),
    ),
    Study(
        name="pytorch/examples mnist",
        folder=f"{EXAMPLES}/mnist",
        script="main.py",
        arguments="--epochs 1",
        reader="""
        Only with an accelerator the script gives its loader a worker. Without, decoding, `ToTensor` and
        `Normalize` of 64 pictures run on the training thread, between the steps. The evaluation comes
        once an epoch, and the loss is read every tenth step.""",
        environment={**PICTURES, "STANDIN_PICTURES": "6400"},
        fix=Fix(
            rule="serial-loading",
            action="loader-workers",
            words="one DataLoader worker",
            file="main.py",
            old="train_kwargs = {'batch_size': args.batch_size}",
            new="train_kwargs = {'batch_size': args.batch_size, 'num_workers': 1}",
        ),
    ),
    Study(
        name="pytorch/examples imagenet --dummy",
        folder=f"{EXAMPLES}/imagenet",
        script="main.py",
        arguments="--dummy --epochs 1 -b 4 -p 5 --seed 0",
        reader="""
        ResNet-18 at 224 x 224 on a CPU computes for hundreds of milliseconds a batch; four workers make
        four pictures of noise in a few. So it is bound by its convolutions, and neither the loader, nor
        `accuracy`, nor `loss.item()` in each step is worth a word. Four workers are too many for two
        cores but have little to do. One checkpoint at the end is all that is written.""",
        environment={**PICTURES, "STANDIN_PICTURES": "160"},
    ),
    Study(
        name="Hugging Face Trainer",
        folder=str(FOREIGN),
        script="hf_trainer.py",
        arguments="",
        reader="""
        Two epochs of 32 steps with an evaluation and a checkpoint after each: for a model so small both
        are long, seen against 32 steps of some ten milliseconds. The Trainer's AdamW is fused by
        itself, and its samples are rows of a tensor. What remains is the Trainer's own Python in each
        step.""",
    ),
    Study(
        name="Lightning Trainer",
        folder=str(FOREIGN),
        script="lightning_trainer.py",
        arguments="",
        reader="""
        Steps of some milliseconds, of which the four layers of this model take the smaller part: the
        rest is Lightning's own Python, `self.log` in each step, an Adam that steps tensor by tensor,
        and a loader that collates 16 rows one by one. With two epochs the evaluation and the checkpoint
        after each weigh, too.""",
    ),
)


def ran(study: Study, source: Path, fix: Fix | None) -> Profile:
    """Runs the script once, in a copy of its folder, and returns what was found."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, runs = Path(temporary) / "copy", Path(temporary) / "runs"
        shutil.copytree(source, folder)
        if study.prepare is not None:
            study.prepare(folder)
        if fix is not None:
            path = folder / fix.file
            text = path.read_text(encoding="utf-8")
            if text.count(fix.old) != 1:
                raise SystemExit(f"{study.name}: {fix.file} does not hold {fix.old!r} once.")
            path.write_text(text.replace(fix.old, fix.new), encoding="utf-8")
        path_of_modules = [str(ROOT), study.environment.get("PYTHONPATH", "")]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "diagnose", "run", "--quiet", "--run-dir", str(runs)),
                study.script,
                *shlex.split(study.arguments),
            ],
            cwd=folder,
            env={**os.environ, **study.environment, "PYTHONPATH": os.pathsep.join(path_of_modules)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{study.name} failed:\n{done.stderr}")
        [run] = runs.iterdir()
        return diagnosed(load_profile(run))


def said(profile: Profile) -> None:
    """Prints what was found in one run."""
    print(f"{profile.steps.count} steps, {format_ms(profile.steps.median_ns or 0)} in the median.\n")
    if not profile.findings:
        print("Nothing was found.\n")
        return
    print("| found | where | lost per step | gain to expect | advice |\n|---|---|---|---|---|")
    for finding in profile.findings:
        gain = finding.gain(profile.step_time_ns)
        place = f"{Path(finding.file).name}:{finding.line}" if finding.file else ""
        size = format_gain(gain.speedup, gain.low, gain.high)
        lost = format_ms(finding.lost_ns_per_step)
        print(f"| {finding.rule} | {place} | {lost} | {size} | {finding.fix} |")
    print()


def tried(study: Study, source: Path, fix: Fix, pairs: int) -> None:
    """Prints predicted and measured gain of a fix, from pairs of runs in the order A B, B A, A B, ..."""
    speedups, predicted = [], []
    for pair in range(pairs):
        order = (None, fix) if pair % 2 == 0 else (fix, None)
        done = {each is fix: ran(study, source, each) for each in order}
        before, after = done[False], done[True]
        assert before.steps.mean_ns is not None and after.steps.mean_ns is not None
        speedups.append(before.steps.mean_ns / after.steps.mean_ns)
        predicted += [
            finding.gain(before.step_time_ns, fix.action).speedup
            for finding in before.findings
            if finding.rule == fix.rule
        ]
    expected = (
        f"predicted {median(predicted):.2f}x in {len(predicted)} of {pairs} runs"
        if predicted
        else f"`{fix.rule}` was found in none of {pairs} runs: a miss"
    )
    spread = f"{min(speedups):.2f} to {max(speedups):.2f}"
    print(
        f"Tried by hand: {fix.words} (`{fix.rule}`). {expected[0].upper()}{expected[1:]}; measured "
        f"{median(speedups):.2f}x in the median of {pairs} pairs ({spread}).\n"
    )


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    print("# Case studies\n\nPrinted by `benchmarks/case_studies.py`.")
    print(fill(heading(args.sources), 110) + "\n")
    for study in STUDIES:
        if args.only.lower() not in study.name.lower():
            continue
        source = args.sources.absolute() / study.folder
        print(f"## {study.name}\n\n`{f'{study.script} {study.arguments}'.rstrip()}`\n", flush=True)
        print(fill(f"Who reads it: {' '.join(study.reader.split())}", 110) + "\n")
        said(ran(study, source, None))
        if study.fix is not None:
            tried(study, source, study.fix, args.pairs)


if __name__ == "__main__":
    main()
