"""The report as one HTML file."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as go
import pytest

from diagnose.core.finding import Gain
from diagnose.core.history import History
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.trial import Measured, Outcome, Safety, Trial, Tuning
from diagnose.report import to_html
from diagnose.report._charts import (
    Chart,
    GainRow,
    Gains,
    Levels,
    Mark,
    PhaseAreas,
    RankMap,
    Roof,
    Roofline,
    StepBins,
    StepLine,
    TimeLines,
    Waterfall,
)
from diagnose.report._colors import DARK_PAGE, LIGHT_PAGE, PHASE_COLORS, SHADES, contrast, text_on
from diagnose.report._html_axes import round_values
from diagnose.report._html_charts import chart_svg
from diagnose.report._plotly import figure
from diagnose.report._plotly_axes import escaped, packed
from diagnose.report._tuning_words import verdict as tuning_verdict
from diagnose.report.tuning import gain_rows
from tests.profiles import FAULTY, FOUR_RANKS, HEALTHY, HOSTILE, HOSTILE_PROFILE, NOTHING, PROFILE, WORKERS


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> Sequence[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_html_report_shows_every_foreign_name_as_text() -> None:
    page = Page(to_html(HOSTILE_PROFILE))
    assert not page.all("img") and not page.all("script")
    assert page.open == [], "every element is closed"
    assert page.text.count(HOSTILE) >= 21
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_html_report_loads_nothing_and_is_small() -> None:
    many = replace(
        PROFILE,
        where=tuple(replace(PROFILE.where[0], line=n, in_worker=n % 2 == 0) for n in range(1, 400)),
        ranks=FOUR_RANKS * 64,
        input=InputStats(workers=WORKERS),
    )
    page = to_html(many)
    assert len(page.encode()) < 60_000
    assert "http" not in page.replace("http-equiv", "") and "url(" not in page and "@import" not in page
    assert all("src" not in attributes and "href" not in attributes for _, attributes in Page(page).tags)


def test_html_report_can_be_read_without_seeing_it() -> None:
    page = Page(to_html(replace(PROFILE, ranks=FOUR_RANKS)))
    assert page.all("html") == [{"lang": "en"}]
    (bar,) = page.all("svg")
    assert bar["role"] == "img" and bar["aria-labelledby"] == "step-title step-desc"
    assert "data wait 50 %, copy 0.0 %, forward 20 %, backward 25 %, optimizer 3.0 %" in page.text
    tables, headers = page.all("table"), page.all("th")
    assert len(tables) == 3 and all(table["aria-label"] for table in tables)
    assert headers and all(header.get("scope") in ("col", "row") for header in headers)


def test_html_report_shows_each_finding_with_its_fix() -> None:
    page = Page(to_html(FAULTY))
    assert len(page.all("article")) == 2
    assert "2.0x (1.5 to 2.0)" in page.text and "To do Give the DataLoader two workers." in page.text
    assert "No fault found that costs 2 % of the step or more" in Page(to_html(HEALTHY)).text


def test_html_bar_is_the_whole_step() -> None:
    parts = Page(to_html(PROFILE)).all("rect")
    widths = [float((part["width"] or "").rstrip("%")) for part in parts]
    assert len(parts) == 8, "phases that took time"
    assert abs(sum(widths) - 100) < 0.01


def test_html_report_of_a_run_without_steps_has_no_bar_and_says_why() -> None:
    page = Page(to_html(NOTHING))
    assert not page.all("svg")
    assert "No optimizer step was seen in 12.3 s; torch was imported." in page.text
    assert "import diagnose; diagnose.step()" in page.text


@pytest.mark.parametrize("phase", list(Phase))
def test_phase_colours_stand_out_from_both_pages_and_carry_readable_text(phase: Phase) -> None:
    color = PHASE_COLORS[phase]
    assert contrast(color, LIGHT_PAGE) >= 3
    assert contrast(color, DARK_PAGE) >= 3
    assert contrast(color, text_on(color)) >= 4.5


@pytest.mark.parametrize("page", [LIGHT_PAGE, DARK_PAGE])
def test_no_shade_of_a_map_is_taken_for_a_gap_in_it(page: str) -> None:
    assert min(contrast(shade, page) for shade in SHADES) >= 1.5
    steps = [contrast(shade, LIGHT_PAGE) for shade in SHADES]
    assert steps == sorted(steps), "from pale to dark"


MEASURED = Measured(
    speedup=1.5, low=1.25, high=1.75, pairs=12, detectable=1.1, without_ns=60e6, with_ns=40e6
)
HISTORY = History(
    width=2,
    phase_ms={Phase.DATA_WAIT: (20.0, 20.0, 5.0, 5.0), Phase.FORWARD: (10.0,) * 4},
    samples_per_s=(100.0, 100.0, 200.0, 200.0),
)
TUNED = replace(
    PROFILE,
    history=HISTORY,
    phase_time_ns={Phase.DATA_WAIT: 20e6, Phase.FORWARD: 10e6},
    tuning=Tuning(
        state="holding",
        trials=(
            Trial(
                action=HOSTILE,
                safety=Safety.EXACT,
                outcome=Outcome.KEPT,
                reason="",
                predicted=Gain(speedup=1.6, low=1.2, high=2.0),
                measured=MEASURED,
                first_step=1,
            ),
        ),
        confirmation=MEASURED,
        tuned=(4, 8),
        tuned_phase_time_ns={Phase.DATA_WAIT: 5e6, Phase.FORWARD: 8e6},
    ),
)


def test_charts_of_a_tuned_run_are_in_the_file_with_their_figures_as_text() -> None:
    page = Page(to_html(TUNED))
    assert page.open == [] and not page.all("script") and not page.all("img")
    assert "1.5x (1.2 to 1.8), predicted 1.6x, kept" in page.text
    assert f"{HOSTILE} in force" in page.text, "where the fix went into force"
    assert "step 8" in page.text and "-15.0 ms" in page.text
    assert "data wait 56 %" in page.text, "the legend says the shares; colour is not all there is"


def test_every_kept_setting_is_written_as_the_script_would_have_it() -> None:
    tuning = TUNED.tuning
    assert tuning is not None
    kept = {
        "one": {"DataLoader.num_workers": 2, "note": "they start anew in each epoch"},
        "two": {"statement": "torch.set_num_threads(1)"},
        "three": {"statement": "import gc; gc.freeze()"},
        "four": {"advice": "with model.no_sync(): ..."},
    }
    trials = tuple(
        replace(tuning.trials[0], action=name, settings=settings) for name, settings in kept.items()
    )
    text = Page(to_html(replace(TUNED, tuning=replace(tuning, trials=trials)))).text
    assert (
        "DataLoader.num_workers = 2\ntorch.set_num_threads(1)\nimport gc; gc.freeze()\n"
        "with model.no_sync(): ..." in text
    )
    assert "One: they start anew in each epoch." in text
    assert "note =" not in text


def test_of_a_fix_that_helped_and_was_undone_later_it_is_not_said_that_it_did_not_help() -> None:
    assert TUNED.tuning is not None
    words = tuning_verdict(replace(TUNED.tuning, dropped={HOSTILE: "asked for in the dashboard"}))
    assert words == f"nothing kept to the end; kept at first and undone later: {HOSTILE}"


@pytest.mark.parametrize("measured", ["confirmation", "earlier"])
def test_gains_that_were_undone_after_all_are_not_drawn_as_confirmed(measured: str) -> None:
    assert TUNED.tuning is not None
    tuning = replace(TUNED.tuning, **{"confirmation": None, "num_earlier": 1, measured: MEASURED})
    assert [row.outcome for row in gain_rows(tuning)] == ["kept", "confirmed"]
    (row,) = gain_rows(replace(tuning, undone="the loss went wrong"))
    assert (row.label, row.kept) == (HOSTILE, False)


def test_areas_are_as_high_as_the_step_and_as_wide_as_the_run() -> None:
    chart = PhaseAreas(
        title="",
        steps=StepBins(width=2),
        phase_ms={phase: np.array(times) for phase, times in HISTORY.phase_ms.items()},
    )
    paths = [path["d"] or "" for path in Page(chart_svg(chart)).all("path") if path.get("fill")]
    whole, data_wait = paths
    assert whole == "M0 1000V0H250V0H500V500H750V500H1000V1000Z"
    assert data_wait == "M0 1000V333H250V333H500V833H750V833H1000V1000Z"


@pytest.mark.parametrize(
    "highest, expected",
    [(42.0, [0, 20, 40]), (3.9, [0, 1, 2, 3]), (0.0, [0]), (1000.0, [0, 250, 500, 750, 1000])],
)
def test_axes_have_a_few_round_values(highest: float, expected: list[float]) -> None:
    assert round_values(highest) == pytest.approx(expected)


def test_interactive_report_carries_plotly_in_the_file_and_may_run_nothing_else() -> None:
    text = to_html(TUNED, interactive=True)
    head = text.partition("</head>")[0]
    assert "script-src 'sha256-" in head and "default-src 'none'" in head and "unsafe-eval" not in head
    assert "plotly.js v" in text
    figures = [
        part.partition("</script>")[0] for part in text.split('<script type="application/json">')[1:]
    ]
    assert len(figures) == 4
    for each in map(json.loads, figures):
        assert each["config"]["showSendToCloud"] is False and each["config"]["plotlyServerURL"] == ""
    assert HOSTILE not in text.replace(escaped(HOSTILE), ""), "no name becomes markup"
    assert "<script src" not in text and "<link" not in head


CHARTS = (
    PhaseAreas(title="t", steps=StepBins(), phase_ms={Phase.FORWARD: np.arange(3.0)}),
    PhaseAreas(title="one step", steps=StepBins(), phase_ms={Phase.FORWARD: np.ones(1)}),
    StepLine(
        title="t",
        unit=HOSTILE,
        steps=StepBins(
            first=4,
            width=2,
            marks=(Mark(step=5, label=HOSTILE, strong=True), Mark(step=6, label=HOSTILE, strong=False)),
        ),
        values=np.array([1.0, np.nan, 2.0]),
    ),
    TimeLines(title="t", unit="MiB", seconds=np.arange(2.0), lines={HOSTILE: np.arange(2.0)}),
    Waterfall(title="t", before_ns={Phase.COPY: 5.0}, after_ns={Phase.GC: 7.0}),
    Gains(
        title="t",
        rows=(
            GainRow(label=HOSTILE, outcome="kept", predicted=1.2, speedup=1.3, interval=(1.1, 1.5)),
            GainRow(label="refused", outcome="refused", predicted=1.2),
        ),
    ),
    RankMap(
        title="t", steps=StepBins(width=4), ranks=(0, 1), values_ms=np.array([[1.0, np.nan], [-1.0, 2.0]])
    ),
    Levels(title="t", unit="samples/s", labels=("a",), values=(1.0,), singles=((1.0, 2.0),), changes=(0,)),
    Roofline(
        title="t",
        bytes_per_s=2e12,
        flops_per_s=5e14,
        points=(Roof(label=HOSTILE, flops_per_byte=40.0, flops_per_s=3e13),),
    ),
)


def test_the_charts_of_a_long_run_with_many_marks_are_sent_in_sixty_kilobytes() -> None:
    bins = np.random.default_rng(0).random(600) * 100
    marks = tuple(
        Mark(step=12_288 * number, label="loader-workers=2 kept 1.2x (1.1 to 1.3)", strong=number % 4 == 0)
        for number in range(100)
    )
    steps = StepBins(width=2048, marks=marks)
    charts = (
        PhaseAreas(title="", steps=steps, phase_ms=dict.fromkeys(Phase, bins)),
        StepLine(title="", unit="samples/s", steps=steps, values=bins),
        TimeLines(title="", unit="CPUs", seconds=bins[:240], lines=dict.fromkeys("abc", bins[:240])),
    )
    sent = sum(len(json.dumps(figure(chart))) for chart in charts)
    assert sent < 60_000, "one tick of the dashboard"


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: type(chart).__name__)
def test_plotly_takes_every_figure_and_reads_no_name_as_markup(chart: Chart) -> None:
    made = figure(chart)
    go.Figure(made)  # raises on a key or a value that plotly does not have
    assert "<img" not in json.dumps(made)


def test_packed_numbers_are_what_plotly_reads() -> None:
    values = np.array([[1.5, np.nan], [3.0, -4.25]])
    made = packed(values)
    assert (made["dtype"], made["shape"]) == ("f4", "2, 2")
    read = np.frombuffer(base64.b64decode(made["bdata"]), dtype="<f4").reshape(2, 2)
    assert np.array_equal(read, values.astype("f4"), equal_nan=True)
