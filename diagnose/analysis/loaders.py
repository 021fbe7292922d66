"""The loaders that fed training: what they are, which feed steps together, and how often they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from diagnose.analysis.spans import whole_steps
from diagnose.core.program import Evaluating, Loader
from diagnose.core.workers import NOT_TRAINING
from diagnose.source.calls import call_at
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog

HALF = 2
"""Loaders that feed steps together have had as many batches made; the reports of one may be older."""

ROUNDING = 0.05
"""A run that is killed has asked for a few batches more than it has finished steps for."""

LEFT = 0.75
"""Beginnings of epochs for each batch that is asked for, from which on the loop takes one and leaves."""


def loaders_of(log: RankLog, sources: Sources) -> tuple[Loader, ...]:
    """Reads the loaders that fed training, the one that fed most steps first; of several that fed the same
    steps together, the one whose workers take longest.

    Args:
        log: One rank's records.
        sources: Where the text of the call that made each is read.
    """
    moved = bool(log.meta.get("facts", {}).get("batches_on_device"))
    return tuple(
        replace(_loader(fact, sources), moves_batches=moved and not fact.get("num_workers"))
        for fact in (facts_of(log)[index] for index in order_of(log))
    )


def evaluating_of(log: RankLog, warmup: int, sources: Sources) -> tuple[Evaluating, ...]:
    """Reads the loaders whose workers were started to evaluate, the one first that this took most.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
        sources: Where the text of the call that made each is read.
    """
    reports = [report for report in log.workers if report.get("loader") == NOT_TRAINING]
    batches = sum(report["batches"] for report in reports)
    made_ns = sum(report["fetch_ns"] + report["collate_ns"] for report in reports) / max(1, batches)
    found = []
    for fact in log.meta.get("facts", {}).get("evaluating", ()) if batches else ():
        end = fact["starts_end"] or len(log.steps)
        took_ns = [took_ns for step, _, took_ns in fact["starts"] if warmup <= step < end]
        start_ns = sum(max(0.0, ns - made_ns) for ns in took_ns) / max(1, end - warmup)
        found.append(Evaluating(loader=_loader(fact, sources), starts=len(took_ns), start_ns=start_ns))
    return tuple(sorted(found, key=lambda each: -each.start_ns))


def _loader(fact: Mapping[str, Any], sources: Sources) -> Loader:
    known = set(Loader.__dataclass_fields__)
    return Loader(
        **{name: value for name, value in fact.items() if name in known},
        construct_ns=fact.get("total_construct_ns", 0) / max(1, fact.get("epochs", 0)),
        call=call_at(sources, fact.get("file", ""), fact.get("line", 0), "DataLoader"),
    )


def order_of(log: RankLog) -> list[int]:
    """Returns the indices of the loaders' facts, in the order of `loaders_of`."""
    facts = facts_of(log)
    latest = max((fact["begun_at"] for fact in facts), default=0)
    # Whoever feeds the steps since the last beginning has not been credited yet.
    since = max(0, whole_steps(log) - latest)
    steps = [fact["steps"] + since * (fact["begun_at"] == latest) for fact in facts]
    busy_ns = [0.0] * len(facts)
    for number, report in _reports(log):
        busy = report["fetch_ns"] + report["collate_ns"]
        busy_ns[number] += busy / max(1, facts[number]["num_workers"])
    for number, (_, wait_ns) in enumerate(_waits_by_loader(log) or ()):
        if number < len(facts) and not facts[number].get("num_workers"):
            busy_ns[number] = float(wait_ns)  # it makes its batches while it is waited for
    return sorted(range(len(facts)), key=lambda index: (-steps[index], -busy_ns[index]))


def facts_of(log: RankLog) -> list[dict[str, Any]]:
    """Returns what was recorded of each loader, in the order of their numbers."""
    facts: list[dict[str, Any]] = log.meta.get("facts", {}).get("loaders", [])
    return facts


def _reports(log: RankLog) -> list[tuple[int, Mapping[str, Any]]]:
    """Returns what workers reported, each with the number of its loader, where that is known."""
    count = len(facts_of(log))
    told = [(report.get("loader"), report) for report in log.workers]
    return [(number, report) for number, report in told if number is not None and 0 <= number < count]


def batches_per_step(log: RankLog) -> float:
    """Returns training batches per step: a whole number where there is one between two readings, since the
    making of an iterator counts as one, and an epoch that ends has asked once more, in vain.
    """
    counters = log.meta.get("counters", {})
    asks = counters.get("batches", 0) + counters.get("asked_aside", 0)
    epochs = sum(fact["epochs"] for fact in facts_of(log))
    steps = max(1, whole_steps(log))
    most = asks / steps
    beside = epochs if begins_anew(log) else 2 * epochs
    whole = ceil((asks - beside) / steps - ROUNDING)
    return float(whole) if 1 <= whole <= most else most


def begins_anew(log: RankLog) -> bool:
    """Whether nearly each batch is the first of an epoch that has more: `next(iter(loader))` in every step.

    An epoch of one batch asks a second time, in vain, unless it is left: it has no more than half as many
    beginnings.
    """
    asks, epochs = log.meta.get("counters", {}).get("batches", 0), sum(f["epochs"] for f in facts_of(log))
    longer = all(
        fact.get("dataset_length") is None or fact["dataset_length"] > (fact.get("batch_size") or 1)
        for fact in facts_of(log)
    )
    return longer and epochs > LEFT * (asks - epochs) > 0


def together(log: RankLog) -> list[int]:
    """Returns the numbers of the loaders that feed each step together, the main one first: such begin in
    the same step, and go as far.

    One of which the script has only looked at a batch before it trained has made fewer, and was asked less.
    """
    facts, order, waits = facts_of(log), order_of(log), _waits_by_loader(log)
    made = [0] * len(facts)
    for number, report in _reports(log):
        made[number] += report["batches"]
    found = order[:1]
    for number in order[1:]:
        fact, main = facts[number], facts[order[0]]
        by_workers, like_main = bool(fact.get("num_workers")), bool(main.get("num_workers"))
        if by_workers and like_main:
            as_often = HALF * made[number] >= made[order[0]]
        elif waits is not None:
            as_often = HALF * waits[number][0] >= waits[order[0]][0]
        else:
            as_often = by_workers >= like_main
        if as_often and all(fact[key] == main[key] for key in ("steps", "begun_at")):
            found.append(number)
    return found


def _waits_by_loader(log: RankLog) -> list[tuple[int, int]] | None:
    """Returns batches asked of each loader and nanoseconds waited for them, while there are several; `None`
    where there is one, or nobody looked."""
    waits = log.meta.get("facts", {}).get("waits")
    return None if waits is None else [(asked, wait_ns) for asked, wait_ns in waits]


def main_wait_share(log: RankLog) -> float:
    """Returns the part of the waits that is for loaders with workers, if the main one has any, or else for
    those without; 1 where that is not known."""
    waits, feeding, facts = _waits_by_loader(log), together(log), facts_of(log)
    if waits is None or len(feeding) < 2:
        return 1.0
    total_ns = sum(waits[number][1] for number in feeding)
    by_workers = bool(facts[feeding[0]].get("num_workers"))
    like_main = [number for number in feeding if bool(facts[number].get("num_workers")) is by_workers]
    return sum(waits[number][1] for number in like_main) / total_ns if total_ns else 1.0
