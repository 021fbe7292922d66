"""The scripts that `compatibility.py` runs, and what is known of each beforehand."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = ROOT / "benchmarks" / "foreign"
STANDINS = FOREIGN / "standins"

NANOGPT = "karpathy+nanoGPT"
EXAMPLES = "pytorch+examples"


class Launch(Enum):
    """How the two arms start the script."""

    PYTHON = "python S"
    TORCHRUN_OUTSIDE = "torchrun -m diagnose run S"
    TORCHRUN_INSIDE = "diagnose run --nproc-per-node 2 S"
    TORCHRUN_AS_MODULE = "diagnose run -m torch.distributed.run S"

    @property
    def suffix(self) -> str:
        """What to add to the name of a script that is started in several ways."""
        return "" if self is Launch.PYTHON else f", 2 ranks, {self.name.lower().replace('_', ' ')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script with its arguments.

    Attributes:
        name: What the table calls it.
        script: Path in this repository, or in the checkout of `source`.
        steps: Optimizer steps that it takes, counted by reading it; the two of a GAN are one step.
        source: Folder of `--sources` that the script comes from; empty for this repository.
        folder: Folder of the source whose files the script expects in the current directory.
        weights: Files it leaves behind that hold the trained weights, from the current directory.
        requires: Distributions that must be installed.
        varies: What of its output differs from run to run by nature (a regular expression); the reader of
            the table is told.
        unordered: Several processes print, in no fixed order: the lines are compared as a set.
        prepare: Makes in the current directory what the script reads.
    """

    name: str
    script: str
    arguments: str = ""
    steps: int
    source: str = ""
    folder: str = ""
    weights: tuple[str, ...]
    requires: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    varies: str = ""
    unordered: bool = False
    launch: Launch = Launch.PYTHON
    prepare: Callable[[Path], None] | None = None


def make_tokens(folder: Path) -> None:
    """Writes what nanoGPT's own `prepare.py` would: counting sequences instead of a download."""
    data = folder / "data" / "toy"
    data.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, length in (("train", 20_000), ("val", 4_000)):
        tokens_T = np.cumsum(rng.integers(1, 4, length)) % 61
        tokens_T.astype(np.uint16).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 61}))


def make_waves(folder: Path) -> None:
    """Writes what `generate_sine_wave.py` would, but shorter, so that the script ends in a minute."""
    start_N1 = np.random.default_rng(2).integers(-80, 80, (10, 1))
    torch.save(np.sin((np.arange(60) + start_N1) / 20), folder / "traindata.pt")


def own_example(script: str, arguments: str, steps: int, launch: Launch = Launch.PYTHON) -> Case:
    """Makes the case of one of our examples."""
    return Case(
        name=f"examples/{script}{launch.suffix}",
        script=f"examples/{script}",
        arguments=f"{arguments} --save-weights weights.pt",
        steps=steps,
        weights=("weights.pt",),
        launch=launch,
    )


def nanogpt(name: str, arguments: str, environment: Mapping[str, str]) -> Case:
    """Makes a case of nanoGPT's training, on a CPU."""
    return Case(
        name=f"nanoGPT train.py{name}",
        source=NANOGPT,
        folder=".",
        script="train.py",
        arguments=f"{NANOGPT_ARGUMENTS} {arguments}",
        steps=61,
        weights=("out/ckpt.pt",),
        environment=environment,
        varies=r"time [\d.]+ms, mfu -?[\d.]+%",
        prepare=make_tokens,
    )


def hf_trainer(name: str, arguments: str, steps: int, launch: Launch = Launch.PYTHON) -> Case:
    """Makes a case of the Trainer of transformers."""
    return Case(
        name=f"Hugging Face Trainer{name}{launch.suffix}",
        script="benchmarks/foreign/hf_trainer.py",
        arguments=arguments,
        steps=steps,
        weights=("out/weights.pt", f"out/checkpoint-{steps}/model.safetensors"),
        requires=("transformers", "accelerate"),
        varies=r"'(train|eval)_(runtime|\w+_per_second)': '[^']+'",
        launch=launch,
    )


def lightning(name: str, arguments: str, steps: int) -> Case:
    """Makes a case of Lightning's Trainer."""
    return Case(
        name=f"Lightning Trainer{name}",
        script="benchmarks/foreign/lightning_trainer.py",
        arguments=arguments,
        steps=steps,
        weights=("out/final.ckpt",),
        requires=("lightning",),
    )


NANOGPT_ARGUMENTS = (
    "--dataset=toy --device=cpu --dtype=float32 --block_size=64 --batch_size=4 --n_layer=2 --n_head=2 "
    "--n_embd=64 --gradient_accumulation_steps=2 --max_iters=60 --lr_decay_iters=60 --warmup_iters=5 "
    "--eval_interval=20 --eval_iters=5 --log_interval=10"
)
IMAGENET_VARIES = r"(Time|Data) +[\d.]+ \( *[\d.]+\)"
PICTURES = {"PYTHONPATH": str(STANDINS), "STANDIN_PICTURES": "1024"}

CASES = (
    own_example(
        "image_classifier.py", "--data pictures --train-pictures 320 --test-pictures 64 --epochs 3", 60
    ),
    own_example("gpt_text.py", "--steps 60 --accumulate 2 --eval-every 20", 60),
    own_example("tabular_mlp.py", "--rows 12000 --epochs 2", 170),
    own_example("gan.py", "--images 2048", 128),
    own_example("ddp.py", "--waves 3200", 300),
    own_example("ddp.py", "--waves 3200", 150, Launch.TORCHRUN_OUTSIDE),
    own_example("ddp.py", "--waves 3200", 150, Launch.TORCHRUN_INSIDE),
    own_example("ddp.py", "--waves 3200", 150, Launch.TORCHRUN_AS_MODULE),
    nanogpt("", "--compile=False", {}),
    # One thread: the compiled gradient of an embedding adds atomically, in any order.
    nanogpt(
        ", compiled",
        "--compile=True",
        {"TORCHINDUCTOR_CACHE_DIR": "{folder}/inductor", "OMP_NUM_THREADS": "1"},
    ),
    Case(
        name="pytorch/examples imagenet --dummy",
        source=EXAMPLES,
        script="imagenet/main.py",
        arguments="--dummy --epochs 1 -b 4 -j 2 -p 5 --seed 0",
        steps=24,
        weights=("checkpoint.pth.tar",),
        environment={**PICTURES, "STANDIN_PICTURES": "96"},
        requires=("pillow",),
        varies=IMAGENET_VARIES,
    ),
    Case(
        name="pytorch/examples dcgan --dataset fake",
        source=EXAMPLES,
        script="dcgan/main.py",
        arguments="--dataset fake --niter 2 --batchSize 16 --ngf 8 --ndf 8 --manualSeed 0",
        steps=64,
        weights=("netG_epoch_1.pth", "netD_epoch_1.pth", "fake_samples_epoch_001.png"),
        environment={**PICTURES, "STANDIN_PICTURES": "512"},
        requires=("pillow",),
    ),
    Case(
        name="pytorch/examples time_sequence_prediction",
        source=EXAMPLES,
        script=str(FOREIGN / "weights_at_end.py"),
        arguments="{source}/time_sequence_prediction/train.py --steps 21",
        steps=21,
        weights=("weights.pt", "predict20.pdf"),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "SOURCE_DATE_EPOCH": "0"},
        requires=("matplotlib",),
        prepare=make_waves,
    ),
    Case(
        name="pytorch/examples mnist",
        source=EXAMPLES,
        script="mnist/main.py",
        arguments="--epochs 2 --batch-size 32 --save-model",
        steps=64,
        weights=("mnist_cnn.pt",),
        environment=PICTURES,
        requires=("pillow",),
    ),
    Case(
        name="pytorch/examples mnist_hogwild, 1 process",
        source=EXAMPLES,
        script="mnist_hogwild/main.py",
        arguments="--epochs 2 --batch-size 32 --num-processes 1 --save_model",
        steps=64,
        weights=("MNIST_hogwild.pt",),
        environment=PICTURES,
        requires=("pillow",),
        varies=r"(?m)^\d+(?=\tTrain Epoch)",
    ),
    Case(
        name="pytorch/examples mnist_hogwild, 2 processes",
        source=EXAMPLES,
        script="mnist_hogwild/main.py",
        arguments="--epochs 2 --batch-size 32 --num-processes 2 --save_model",
        steps=64,
        weights=(),
        environment=PICTURES,
        requires=("pillow",),
        varies=r"(?m)^\d+(?=\tTrain Epoch)|Loss: [\d.]+|loss: [\d.]+, Accuracy: \d+/\d+ \(\d+%\)",
        unordered=True,
    ),
    Case(
        name="pytorch/examples reinforce",
        source=EXAMPLES,
        script=str(FOREIGN / "weights_at_end.py"),
        arguments="{source}/reinforcement_learning/reinforce.py",
        steps=44,
        weights=("weights.pt",),
        environment={"PYTHONPATH": str(STANDINS)},
    ),
    hf_trainer("", "", 64),
    hf_trainer(", 3 micro-batches", "--accumulate 3", 22),
    hf_trainer("", "--epochs 3", 48, Launch.TORCHRUN_OUTSIDE),
    hf_trainer(" with DiagnoseCallback", "--callback runs", 64),
    lightning("", "", 112),
    lightning(" with DiagnoseCallback", "--callback runs", 112),
    lightning(", 4 micro-batches", "--accumulate 4", 28),
    lightning(", 2 optimizers by hand", "--manual", 112),
    Case(
        name="Accelerate loop, 2 micro-batches",
        script="benchmarks/foreign/accelerate_loop.py",
        steps=64,
        weights=("weights.pt",),
        requires=("accelerate",),
    ),
)
