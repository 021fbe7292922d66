"""What a page is sent from tick to tick: never more than was promised, and all of it in the end."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dash
import pytest
from dash import html
from diagnose.dashboards import _analyst, _live, _source
from diagnose.dashboards._analyst import Analyst
from diagnose.dashboards._parcel import TICK_BYTES, Parcel, Part
from diagnose.dashboards._server import DashboardApp, create_app

from diagnose.core.finding import Finding
from tests.following import answered, quickly, tick, until
from tests.running import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import dashboard_feed

PROMISED_BYTES = 60_000
NUM_FINDINGS = 40
NUM_RANKS = 8
NUM_STEPS = 2400
"""In bins of four they are as many as a chart has."""


class OnDemand(Analyst):
    """Answers with many findings, when it is told to; each time with one fewer."""

    may = threading.Event()
    answers = 0

    def analyse(self, run: Path, told: Callable[..., None], *, urgent: bool = True) -> None:
        def work() -> None:
            OnDemand.may.wait(30)
            OnDemand.may.clear()
            analysis = _analyst.analyse(run)
            findings = many(analysis.profile.findings[0], NUM_FINDINGS - OnDemand.answers, run)
            OnDemand.answers += 1
            told(replace(analysis, profile=replace(analysis.profile, findings=findings)))

        threading.Thread(target=work, daemon=True).start()


def many(finding: Finding, count: int, run: Path) -> tuple[Finding, ...]:
    """Returns as many findings, of different lines of the script."""
    shared = replace(finding, file=str(run.parent / "train.py"))
    return tuple(replace(shared, rule=f"fault-{number:02d}", line=number + 1) for number in range(count))


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DashboardApp]:
    monkeypatch.setattr(_source, "Analyst", OnDemand)
    monkeypatch.setattr(_live, "ANALYSE_EVERY_S", 0.0)
    monkeypatch.setattr(_live, "ANALYSE_SHARE", 1e3)
    monkeypatch.setattr(_live, "ANALYSE_GROWTH", 1.001)
    monkeypatch.setattr(OnDemand, "may", threading.Event())
    monkeypatch.setattr(OnDemand, "answers", 0)
    dashboard_feed.begin(tmp_path / "run", NUM_STEPS, NUM_RANKS)  # one is late, which is found
    with quickly():
        made = create_app(tmp_path)
        yield made
        OnDemand.may.set()
        made.source.close()


class Tab:
    """What a browser does with the answers."""

    def __init__(self, app: DashboardApp) -> None:
        self.app = app
        self.lists: dict[str, list[Any]] = {"findings": [], "details": []}
        self.figures: dict[str, int] = {}
        self.drawn: Any = None
        self.bytes: list[int] = []

    def tick(self) -> bool:
        """Says whether something came."""
        answer = answered(self.app, "run", self.drawn)
        sent = json.loads(answer)["response"] if answer else {}
        if not sent:
            return False
        self.bytes.append(len(answer))
        for name, shown in self.lists.items():
            if f"run-{name}" in sent:
                self.lists[name] = patched(shown, sent[f"run-{name}"]["children"])
        for name in ("ledger", "throughput", "memory", "cpus", "device"):
            self.figures[name] = self.figures.get(name, 0) + (f"run-{name}" in sent)
        self.drawn = sent["run-drawn"]["data"]
        return True


def patched(shown: list[Any], children: Any) -> list[Any]:
    """Does what dash's renderer does with a list, or with a patch of one."""
    if isinstance(children, list):
        return children
    shown = list(shown)
    for step in children["operations"]:
        value = step["params"]["value"]
        if step["operation"] == "Append":
            shown.append(value)
        else:
            assert step["operation"] == "Assign"
            shown[step["location"][0]] = value
    return shown


def rules_in(cards: list[Any]) -> list[str]:
    """Returns the names of the rules of finding cards, in order."""
    found = []
    for card in cards:
        text = json.dumps(card)
        found.append(text[text.index("fault-") :][:8])
    return found


def test_a_run_with_many_findings_never_sends_more_in_a_tick_than_was_promised(
    app: DashboardApp, tmp_path: Path
) -> None:
    tab, live = Tab(app), app.source.run("run")
    until(live, lambda now: now.filled_share == 1.0 and now.num_steps == NUM_STEPS)
    while not tab.figures.get("device"):
        tab.tick()
    del tab.bytes[:]
    files = [dashboard_feed.opened(tmp_path / "run", rank, NUM_STEPS) for rank in range(NUM_RANKS)]
    for expected in (NUM_FINDINGS, NUM_FINDINGS - 1):
        OnDemand.may.set()
        until(live, lambda now, n=expected: now.profile is not None and len(now.profile.findings) == n)
        drawn = dict(tab.figures)
        ticks = 0
        while len(tab.lists["findings"]) != expected or tab.drawn["owed"]:
            ticks += tab.tick()
            assert ticks < 30, (tab.drawn, len(tab.lists["findings"]))
        assert ticks > 1, "more than one tick may hold"
        assert rules_in(tab.lists["findings"]) == [f"fault-{n:02d}" for n in range(expected)]
        assert len(tab.lists["details"]) >= 3 and "Where the step goes" in json.dumps(tab.lists["details"])
        for name in ("ledger", "throughput"):
            assert tab.figures[name] - drawn[name] >= ticks // 2, "no findings stop what goes on"
        if expected == NUM_FINDINGS:
            dashboard_feed.grow(files, NUM_STEPS)
    for file in files:
        file.close()
    assert sum(tab.bytes) > 2 * PROMISED_BYTES
    assert max(tab.bytes) <= PROMISED_BYTES


def test_findings_that_stay_as_they_are_are_not_sent_again(app: DashboardApp) -> None:
    tab, live = Tab(app), app.source.run("run")
    OnDemand.may.set()
    until(live, lambda now: now.filled_share == 1.0 and now.profile is not None)
    while tab.tick() or not tab.lists["findings"]:
        if tab.drawn and not tab.drawn["owed"] and tab.lists["findings"]:
            break
    analysed = {**tab.drawn, "analysed": None, "version": -1}
    sent = tick(app, "run", analysed)
    assert "run-ledger" in sent and "run-findings" not in sent and "run-details" not in sent


def test_a_page_that_is_opened_afterwards_is_sent_whole(app: DashboardApp) -> None:
    live = app.source.run("run")
    OnDemand.may.set()
    until(live, lambda now: now.filled_share == 1.0 and now.profile is not None)
    tab = Tab(app)
    assert tab.tick()
    assert len(tab.lists["findings"]) == NUM_FINDINGS and not tab.drawn["owed"] and not tab.drawn["more"]
    assert set(tab.figures.values()) == {1}


# -- who waits


def pieces(**sizes: int) -> dict[str, Any]:
    return {name: "x" * (size - 2) for name, size in sizes.items()}


def test_what_does_not_fit_waits_and_goes_first_the_next_time() -> None:
    half = TICK_BYTES // 2
    first = Parcel(7, {})
    first.fill(pieces(a=half, b=half, c=half))
    assert (first.taken, first.is_full) == (["a", "b"], True)
    second = Parcel(8, first.sent)
    second.fill(pieces(a=half, b=half, c=half))
    assert second.taken == ["c", "a"]
    third = Parcel(9, second.sent)
    third.fill(pieces(a=half, b=half, c=half), first=("c",))
    assert third.taken == ["c", "b"]


def test_what_is_larger_than_a_tick_goes_alone_and_what_must_go_counts() -> None:
    parcel = Parcel(1, {})
    parcel.must_hold("x" * TICK_BYTES)
    parcel.fill(pieces(a=2 * TICK_BYTES, b=10))
    assert (parcel.taken, parcel.is_full) == (["a"], True)


def test_of_a_list_only_what_changed_is_sent() -> None:
    part = Part("details", [])
    part.becomes([html.P("one"), html.P("two")])
    assert [each.children for each in part.answer(part.pieces())] == ["one", "two"]
    assert not part.is_short
    again = Part("details", part.stamps)
    assert again.answer([]) is dash.no_update, "before it is known what it shall be"
    again.becomes([html.P("one"), html.P("second"), html.P("three")])
    assert list(again.pieces()) == ["details/1", "details/2"]
    operations = again.answer(["details/1"]).to_plotly_json()["operations"]
    assert [(each["operation"], each["location"]) for each in operations] == [("Assign", [1])]
    assert again.is_short
    last = Part("details", again.stamps)
    last.becomes([html.P("one")])
    assert last.is_new and list(last.pieces()) == ["details/0"], "a shorter list is sent anew"
