"""The training loss on the page of before and after: kept in a few points, marked, or missed in words."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dash._utils import to_json
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards.before_after import BeforeAfter

from diagnose.analysis.history import loss_of
from diagnose.core.history import LOSS, Loss
from diagnose.core.liveness import Liveness, State
from diagnose.core.trial import Tuning
from diagnose.launch.tuning import LOSS_STEPS
from diagnose.tuner.loss_curve import MAX_POINTS, SPARSE, LossCurve
from tests.following import followed, until
from tests.profiles import PROFILE
from tests.recorded import manifest, record


def test_the_curve_of_a_long_run_is_a_few_means_of_equal_stretches() -> None:
    curve, draw, losses, told = LossCurve(), random.Random(0), [], 0
    while len(losses) < 50_000:
        new = [draw.random() for _ in range(draw.choice((0, 1, 1, 1, 3)))]  # a device tells later
        losses += new
        curve.add(len(losses), new)
        told += len(new)
    noted = curve.record()[LOSS]
    width, means = noted["width"], noted["means"]
    assert width == 256 and len(means) == -(-len(losses) // width) <= MAX_POINTS
    for at in (0, 7, len(means) - 1):
        part = losses[at * width : (at + 1) * width]
        assert means[at] == pytest.approx(sum(part) / len(part), rel=1e-5)


def test_steps_without_a_loss_and_losses_that_are_no_numbers_are_gaps() -> None:
    curve = LossCurve()
    assert curve.record() == {}
    curve.add(3, [math.nan])
    assert curve.record() == {}
    curve.add(5, [2.0])
    assert curve.record() == {LOSS: {"width": 1, "means": [None, None, None, None, 2.0]}}


@pytest.mark.parametrize("steps", [150, 300, 600, 1_000, 1_100])
def test_where_one_loss_in_a_few_steps_is_read_the_curve_is_a_line(steps: int) -> None:
    curve, each = LossCurve(), [*range(30), *range(36, steps, LOSS_STEPS)]
    for step in each:
        curve.add(step + 1, [float(step)])
    noted = curve.record()[LOSS]
    assert noted["width"] == SPARSE, "no finer than there are losses, and no coarser"
    assert None not in noted["means"][: each[-1] // SPARSE + 1]
    assert noted["means"][10] == pytest.approx(84, abs=8), "what is between is a mean of what was there"


def test_the_curve_stays_as_fine_as_it_is_where_but_some_steps_had_no_loss() -> None:
    curve = LossCurve()
    for step in range(100):
        curve.add(step + 1, [math.nan if step in (20, 50, 51, 52) or 70 <= step < 90 else 1.0])
    noted = curve.record()[LOSS]
    assert noted["width"] == 1
    gaps = [at for at, mean in enumerate(noted["means"]) if mean is None]
    assert gaps == [20, 50, 51, 52, *range(70, 90)]


@pytest.mark.parametrize(
    "noted",
    [None, 3, {}, {"width": 0, "means": [1]}, {"width": 1, "means": ["x"]}, {"width": 1, "means": [None]}],
)
def test_a_loss_that_is_damaged_or_missing_is_none(noted: object) -> None:
    assert loss_of({LOSS: noted}) is None
    assert loss_of({}) is None


def test_the_loss_of_a_run_is_read_from_its_file(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 100, loss={"width": 32, "means": [3.0, None, 1.0]})
    with followed(folder) as live:
        loss = until(live, lambda now: now.filled_share == 1.0).loss
    assert loss is not None and loss.width == 32
    assert loss.means[0] == 3 and np.isnan(loss.means[1])


PARTS = ("before anything was changed", "while fixes were tried", "with all kept fixes")


def page(loss: Loss | None, device: str = "cpu") -> str:
    snapshot = Snapshot(
        version=1,
        id="run",
        liveness=Liveness(state=State.ENDED),
        num_steps=400,
        loss=loss,
        tuning=Tuning(state="ended"),
        profile=replace(
            PROFILE,
            run=replace(PROFILE.run, device=device),
            tuning=Tuning(state="ended", untouched=(0, 100), tuned=(200, 300)),
        ),
    )
    drawn: str = to_json(BeforeAfter().draw(snapshot, {}))
    return drawn


def test_the_loss_before_and_after_is_told_with_its_curve() -> None:
    means = (*[5.0] * 10, *[4.0] * 10, *[2.0] * 10)
    words = page(Loss(width=10, means=means))
    assert all(f'"name":"{name}"' in words for name in PARTS), "what the parts of the curve are"
    assert "Training loss over the steps" in words
    assert "Mean before anything was changed: 5; with all kept fixes: 2." in words
    assert "Tuning ended after some 300 steps, and noted it no longer." in words
    steep = page(Loss(width=10, means=tuple(mean**10 for mean in means)))
    assert '"log"' not in words and '"log"' in steep, "or one sees nothing"


def test_a_page_without_a_loss_says_why() -> None:
    assert "began at a single number" in page(None)
    assert "every reading is a copy to the host" in page(None, "cuda")
