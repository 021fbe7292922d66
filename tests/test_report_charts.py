"""The charts of a run in its HTML file: the same as in the dashboard, and true to what was recorded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from diagnose.analysis.profile import load_profile
from diagnose.core.deep_window import ClassTime, Counted, DeepWindow, Rates, Trace, Work, WorkClass
from diagnose.core.phases import Phase
from diagnose.report import to_html
from diagnose.report._charts import (
    Chart,
    Mark,
    PhaseAreas,
    RankMap,
    Roof,
    Roofline,
    StepBins,
    StepLine,
    StepLines,
    TimeLines,
)
from diagnose.report._html_charts import chart_svg
from diagnose.report._html_maps import NUM_SHADES
from diagnose.report._plotly import figure
from tests.profiles import HOSTILE, PROFILE
from tests.recorded import MS, manifest, record
from tests.test_dashboard_ranks import NUM_STEPS, write_met
from tests.test_report_html import CHARTS, Page

MAP = np.array([[0.0, 0.0, 4.0], [np.nan, 1.0, 0.1]])
ROOF = Roofline(
    title="t",
    bytes_per_s=1e10,
    flops_per_s=1e12,
    points=(Roof(label=HOSTILE, flops_per_byte=10.0, flops_per_s=1e11),),
)
FALLS = StepLines(
    title="t",
    unit=HOSTILE,
    steps=StepBins(width=2, marks=(Mark(step=2, label=HOSTILE, strong=True),)),
    lines={HOSTILE: np.array([100.0, 10.0, np.nan]), "after": np.array([np.nan, 10.0, 0.1])},
    logarithmic=True,
)


def lines(svg: str) -> list[str]:
    """The lines of a chart, without those of its legend."""
    return [
        path["d"] or ""
        for path in Page(svg).all("path")
        if str(path.get("class")).startswith("line") and path["d"] != "M0 6H28"
    ]


@pytest.mark.parametrize("chart", [*CHARTS, ROOF, FALLS], ids=lambda chart: type(chart).__name__)
def test_every_chart_of_a_run_is_a_drawing_in_which_no_name_is_markup(chart: Chart) -> None:
    svg = chart_svg(chart)
    page = Page(svg)
    assert page.open == [] and not page.all("img"), "every element is closed"
    if type(chart).__name__ != "Levels":  # the commits of a gate are no part of a run
        assert page.all("svg") or page.all("dl")
    assert "nan" not in svg.lower().replace("nanosecond", "")


def test_plotly_takes_lines_that_have_a_part_each() -> None:
    made = figure(FALLS)
    go.Figure(made)  # raises on a key or a value that plotly does not have
    assert "<img" not in json.dumps(made)
    assert made["layout"]["legend"]["y"] < 0, "the marks are named above"
    marks = (*FALLS.steps.marks, Mark(step=5, label="late", strong=True))
    marked = replace(FALLS, steps=replace(FALLS.steps, marks=marks))
    sides = [each["xanchor"] for each in figure(marked)["layout"]["annotations"]]
    assert sides == ["left", "right"], "a name that does not fit would make the axis longer"


def test_a_line_is_broken_where_nothing_was_measured_and_a_lone_value_is_seen() -> None:
    values = np.array([1.0, 2.0, np.nan, 2.0, np.nan])
    chart = TimeLines(title="t", unit="MiB", seconds=np.arange(5.0), lines={"one": values})
    (path,) = lines(chart_svg(chart))
    assert re.fullmatch(r"M0 \d+L250 \d+M750 \d+h6", path)
    (stairs,) = lines(chart_svg(StepLine(title="t", unit="MiB", steps=StepBins(width=2), values=values)))
    assert re.fullmatch(r"M0 \d+V\d+H200V\d+H400M600 \d+V\d+H800", stairs)


def test_a_first_step_of_seconds_does_not_flatten_all_others_and_the_chart_says_so() -> None:
    times = np.full(100, 10.0)
    times[0] = 900.0
    chart = PhaseAreas(title="t", steps=StepBins(), phase_ms={Phase.FORWARD: times})
    page = Page(chart_svg(chart))
    assert "cut off; the highest is 900 ms" in page.text
    (area,) = [path["d"] or "" for path in page.all("path") if path.get("fill")]
    usual = int(area.split("H10V")[1].split("H")[0])
    assert usual < 300, "of 1000 from the top"
    assert "cut off" not in chart_svg(replace(chart, phase_ms={Phase.FORWARD: times[1:]}))


def test_a_loss_that_falls_by_powers_of_ten_has_an_axis_of_them() -> None:
    svg = chart_svg(replace(FALLS, lines={"loss": np.array([100.0, 10.0, 1.0, 0.1])}))
    (path,) = lines(svg)
    heights = [int(point.split()[1]) for point in path[1:].split("L")]
    assert np.diff(heights).tolist() == pytest.approx([333, 333, 333], abs=1)
    assert all(f">{power}</span>" in svg for power in ("0.1", "1", "10", "100"))


def test_the_map_of_ranks_is_darkest_where_a_rank_is_latest_and_empty_where_it_told_nothing() -> None:
    page = Page(chart_svg(RankMap(title="t", steps=StepBins(width=8), ranks=(0, 7), values_ms=MAP)))
    shades = [(path["fill"], path["d"]) for path in page.all("path") if path.get("fill")]
    assert shades[-1][1] == "M667 0H1000V500H667Z", "the last of the upper row, the highest value"
    assert shades[0][1] == "M0 0H667V500H0ZM667 500H1000V1000H667Z", "neighbours are one; the gap is none"
    assert len(shades) == 3 <= NUM_SHADES
    assert "rank 0" in page.text and "rank 7" in page.text and "4.00 ms" in page.text


def test_the_roof_bends_where_arithmetic_begins_to_be_the_limit() -> None:
    (path,) = lines(chart_svg(ROOF))
    (left, top), (bend, flat), (right, end) = [map(int, point.split()) for point in path[1:].split("L")]
    assert (left, right) == (0, 1000) and 0 < bend < 1000
    assert top > flat == end, "slanted, then flat"
    page = Page(chart_svg(ROOF))
    (dot,) = [each for each in page.all("span") if str(each.get("class")).startswith("dot")]
    x, y = re.findall(r"[\d.]+", str(dot["style"]))
    assert float(x) < bend / 10, "ten FLOP per byte are below the bend at a hundred"
    assert float(y) < 100 - flat / 10


# -- of a run that was recorded


def test_the_file_of_a_run_holds_its_memory_cpus_and_loss(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 400, loss={"width": 16, "means": [3.0, None, 1.0]})
    profile = load_profile(folder)
    history = profile.history
    assert history is not None and history.loss is not None
    assert history.loss.means[0] == 3 and np.isnan(history.loss.means[1])
    assert set(history.memory_bytes.values) == {"resident"}, "a CPU has no device memory"
    assert set(history.memory_bytes.values["resident"]) == {float(1 << 30)}
    own = history.cpus.values["training process"]
    assert np.isnan(own[0]) and own[1:] == pytest.approx([1.0] * 19), "one thread that never waits"
    assert history.cpus.values["all programs"][1:] == pytest.approx([2.0] * 19)
    assert not history.device_percent.values
    text = Page(to_html(profile)).text
    for title in ("Memory and CPUs", "Memory of the training process over time", "CPUs in use over time"):
        assert title in text
    assert "at most, of the training process" in text and "Training loss over the steps" in text
    interactive = to_html(profile, interactive=True)
    assert interactive.count('class="interactive"') == 5, "ledger, throughput, loss, memory, CPUs"


def test_charts_over_the_steps_end_at_the_last_step_not_with_its_bin(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 5000, loss={"width": 512, "means": [3.0] * 10})
    profile = load_profile(folder)
    assert profile.history is not None and 5000 % profile.history.width
    text = Page(to_html(profile)).text
    assert text.count("step 5,000") == 3, "ledger, throughput, loss"
    assert re.findall(r"step 5,[1-9]|step 5,0[1-9]", text) == []
    last = RankMap(title="t", steps=StepBins(width=8, end=19), ranks=(0, 7), values_ms=MAP)
    assert "step 19" in chart_svg(last)


def test_the_map_of_a_run_comes_to_what_its_table_says_of_each_rank(tmp_path: Path) -> None:
    profile = load_profile(write_met(tmp_path / "run"))
    late = profile.history.late if profile.history is not None else None
    assert late is not None and late.ranks == (0, 1, 2, 3) and late.width == 8
    steps = np.minimum(late.width, NUM_STEPS - late.width * np.arange(len(late.late_ns[0])))
    totals = np.array(late.late_ns) @ steps / NUM_STEPS
    assert totals.tolist() == pytest.approx([rank.late_ns_per_step for rank in profile.ranks], rel=1e-9)
    page = Page(to_html(profile))
    assert "How long the others waited for each rank over the measured steps" in page.text


def test_the_map_of_ranks_that_were_not_seen_to_meet_shows_who_waits_less_and_when(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    usual = {"forward": 10.0, "communication": 5.0}
    for rank in range(4):
        slots = {"forward": 13.0, "communication": 2.0} if rank == 3 else usual
        record(folder, 500, rank=rank, slots_ms=slots)
    profile = load_profile(folder)
    late = profile.history.late if profile.history is not None else None
    assert late is not None and len(late.late_ns[0]) <= 64
    assert np.mean(late.late_ns[3]) == pytest.approx(3 * MS, rel=0.1)
    assert np.mean(late.late_ns[0]) < 0.2 * MS


def test_a_run_of_one_rank_has_no_map_and_a_deep_window_its_roofline(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 60)
    profile = load_profile(folder)
    assert profile.history is not None and profile.history.late is None
    products = ClassTime(work=WorkClass.MATRIX, count=10, total_ns=10 * MS)
    window = DeepWindow(
        rank=0,
        first_step=10,
        num_steps=2,
        wall_ns=80 * MS,
        trace=Trace(classes=(products,)),
        counted=Counted(
            work=(Work(work=WorkClass.MATRIX, count=5, flops=10**8, num_bytes=10**6),), dtype="float32"
        ),
        rates=Rates(device="this CPU", copy_bytes_per_s=1e10, flops_per_s=1e11),
    )
    assert "under what this CPU reached" in Page(to_html(replace(PROFILE, deep_window=window))).text


def test_marks_are_named_where_they_are_and_to_those_who_cannot_see_them() -> None:
    marks = tuple(Mark(step=number, label=f"trial {number}") for number in range(20))
    chart = StepLine(title="t", unit="samples/s", steps=StepBins(marks=marks), values=np.ones(20))
    page = Page(chart_svg(chart))
    assert len(page.all("title")) == 20, "each, on hovering"
    assert "trial 0 at step 1" in page.text and "and 8 more" in page.text
