"""What a run's records say of the program: its objects, its graph, its compiler, its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.analysis.spans import rank_of, whole_steps
from diagnose.core.graph import Compiler, Dropped, Graph, GraphBreak, Work
from diagnose.core.ledger import COLUMNS
from diagnose.core.parallel import MODEL_SHARE, Averaging, Ddp, Fsdp, Pipeline
from diagnose.core.program import Calls, Loader, Memory, Model, Optimizer, Program
from diagnose.source.calls import call_at
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog

FIRST_TIMED = 4
"""The first passes set connections and buckets up."""

MIN_READINGS = 12
"""Fewer readings of the memory, two a second, do not make a slope."""

MOST_OF_SHARD = 0.75
"""Part of what is trained that an optimizer has where it has a shard of it: of two ranks, half."""

WAITED_IN_FSDP = {"gather_ns": "gathered_ns", "regather_ns": "regathered_ns", "scatter_ns": "scattered_ns"}
"""Means of a step, and the sums of all steps that they are made of."""


def program_of(log: RankLog, warmup: int, sources: Sources) -> Program:
    """Reads what hooks learnt of one rank's live objects (`Recorder.facts`), but for what takes all ranks.

    Args:
        log: The rank's records.
        warmup: Leading steps that the memory's growth leaves out.
        sources: Where the text of the call that made an optimizer is read.
    """
    facts = _facts(log)
    optimizers = [
        {
            **fact,
            "zeroes_grads": facts.get("zeroes_grads"),
            "call": call_at(sources, fact.get("file", ""), fact.get("line", 0), fact.get("kind", "")),
        }
        for fact in facts.get("optimizers", ())
    ]
    return Program(
        loaders=tuple(made(Loader, facts.get("loaders", ()))),
        optimizers=tuple(made(Optimizer, optimizers)),
        models=tuple(made(Model, facts.get("models", ()))),
        calls=next(made(Calls, _one(facts.get("calls"))), None),
        graph=next(_with_works(Graph, facts.get("graph")), None),
        dropped=next(_with_works(Dropped, facts.get("dropped")), None),
        compiler=next(map(_compiler, _one(facts.get("compiler"))), None),
        memory=memory_of(log, warmup),
        fsdp=fsdp_of(log),
        averaging=averaging_of(log),
        pipeline=pipeline_of(log, sources),
    )


def ddp_of(log: RankLog) -> Ddp | None:
    """Reads what one rank's `DistributedDataParallel` told; `None` without one."""
    fact = _facts(log).get("ddp")
    if not fact:
        return None
    own = {"rank": rank_of(log), "passes_per_step": _passes(log)}
    ddp: Ddp = next(made(Ddp, [{**_ddp(fact), **own}]))
    return ddp


def with_call(sources: Sources, ddp: Iterable[Ddp]) -> tuple[Ddp, ...]:
    """Returns them with the call that made the first one."""
    every = list(ddp)
    for first in every[:1]:
        call = call_at(sources, first.file, first.line, "DistributedDataParallel")
        every[0] = replace(first, call=call)
    return tuple(every)


def fsdp_of(log: RankLog) -> Fsdp | None:
    """Reads what one rank's sharded parameters told; `None` without any. The waits are of all steps, and
    those of GPUs unknown: see `core.parallel.Fsdp`."""
    fact = _facts(log).get("fsdp")
    steps = whole_steps(log)
    if not fact or not steps:
        return None
    means = {
        ours: float(fact[total]) / steps
        for ours, total in WAITED_IN_FSDP.items()
        if total in fact and fact.get("on_cpu")
    }
    fsdp: Fsdp = next(made(Fsdp, [{**fact, **means}]))
    return fsdp


def pipeline_of(log: RankLog, sources: Sources) -> Pipeline | None:
    """Reads what one rank's schedule of a pipeline told; `None` without one."""
    fact = _facts(log).get("pipeline")
    if not fact:
        return None
    call = call_at(sources, fact["file"], fact["line"], fact["kind"])
    pipeline: Pipeline = next(made(Pipeline, [{**fact, "call": call}]))
    return pipeline


def exchanged_ns(log: RankLog) -> float | None:
    """Returns nanoseconds per step that a rank waited for one other, or in what model and optimizers call:
    of all steps, as of `fsdp_of`.

    `None` where it does so and its steps are by the device's clock, which does not tell what is waited for.
    """
    inside = _averages_inside(log)
    return _waited_ns(log, "exchanges", -inside["waited_ns"] if inside else 0)


def among_all_ns(log: RankLog) -> float:
    """Returns what of `exchanged_ns` a rank waited for all others, in what its model calls; nothing where
    that is not known."""
    waited_ns: int = _facts(log).get("exchanges", {}).get("among_all_ns", 0)
    return waited_ns / max(1, whole_steps(log))


def averaged_ns(log: RankLog) -> float | None:
    """Returns nanoseconds per step in which a rank's loop added up tensors over the ranks itself, between a
    backward pass and the optimizer's step; where its gradients are added up inside of one, in these alone.
    What it hands on of the parameters that each rank's optimizer updates is a part of it. Otherwise as
    `exchanged_ns`."""
    inside = _averages_inside(log)
    if inside is None:
        return _waited_ns(log, "averaging", _handing_on_ns(log))
    return None if log.meta.get(BY_DEVICE) else inside["waited_ns"] / max(1, whole_steps(log))


def _waited_ns(log: RankLog, name: str, besides_ns: int) -> float | None:
    fact = _facts(log).get(name)
    if not fact and not besides_ns:
        return 0.0
    if log.meta.get(BY_DEVICE):
        return None
    waited_ns: int = (fact or {}).get("waited_ns", 0) + besides_ns
    return max(0, waited_ns) / max(1, whole_steps(log))


def averaging_of(log: RankLog) -> Averaging | None:
    """Returns what one rank's loop adds up over the ranks itself; `None` where it does not, or where it is
    not known how much its optimizers update."""
    inside = _averages_inside(log)
    if inside is not None:
        return _averaging(log, inside, inside=True)
    return _averaging(log, _facts(log).get("averaging"))


def _averages_inside(log: RankLog) -> Mapping[str, Any] | None:
    """Returns what a rank adds up inside of its backward passes or its optimizer's steps if that is its
    gradients; `None` where DDP or FSDP2 reduces them, or the loop between the two."""
    facts = _facts(log)
    fact: Mapping[str, Any] | None = facts.get("averaging_inside")
    averaging, between = _averaging(log, fact), _averaging(log, facts.get("averaging"))
    if averaging is None or not averaging.is_of_gradients or facts.get("ddp") or facts.get("fsdp"):
        return None
    return None if between is not None and between.is_of_gradients else fact


def _handing_on_ns(log: RankLog) -> int:
    """Returns nanoseconds in which a rank hands on what its optimizers have updated: where they have a part
    of the parameters only, and as much is handed on as is trained, or nearly."""
    facts = _facts(log)
    fact, optimizers = facts.get("handed_on"), facts.get("optimizers", ())
    if not fact or fact["elements"] < MODEL_SHARE * fact["trained"] * whole_steps(log):
        return 0
    has = {name: sum(each[name] for each in optimizers) for name in ("num_elements", "num_tensors")}
    is_shard = has["num_elements"] <= MOST_OF_SHARD * fact["trained"]
    if not is_shard and has["num_tensors"] > MOST_OF_SHARD * fact["trained_tensors"]:
        return 0
    waited_ns: int = fact["waited_ns"]
    return waited_ns


def _averaging(log: RankLog, fact: Mapping[str, Any] | None, *, inside: bool = False) -> Averaging | None:
    steps = whole_steps(log)
    elements = sum(each.get("num_elements", 0) for each in _facts(log).get("optimizers", ()))
    if not fact or not elements or not steps:
        return None
    # An optimizer may have a part of what is trained, and the others' ranks the rest.
    elements = max(elements, min(fact.get("trained", 0), fact["elements"] / max(1, fact["passes"])))
    return Averaging(
        passes=fact["passes"] / steps,
        times=fact["elements"] / (elements * steps),
        rounds=fact.get("rounds", steps) / steps,
        inside=inside,
    )


def memory_of(log: RankLog, warmup: int) -> Memory:
    """Reads the memory that the process keeps over the measured steps."""
    rows = [
        (step, r.get("own_bytes", r["resident_bytes"]))
        for _, step, r in log.training_vitals
        if "resident_bytes" in r
    ]
    total = _facts(log).get("memory_bytes")
    if not rows:
        return Memory(total_bytes=total)
    rows = [row for row in rows if row[0] >= warmup]
    growth = steps = None
    if len(rows) >= MIN_READINGS:
        quarters = np.array_split(np.array(rows, dtype=float), 4)
        medians = [float(np.median(quarter[:, 1])) for quarter in quarters]
        grew = all(late > early for early, late in pairwise(medians))
        growth = round(medians[-1] - medians[0]) if grew else 0
        steps = round(float(np.median(quarters[-1][:, 0]) - np.median(quarters[0][:, 0])))
    return Memory(
        rss_bytes=rows[-1][1] if rows else None,
        growth_bytes=growth,
        growth_steps=steps,
        total_bytes=total,
    )


def _ddp(fact: Mapping[str, Any]) -> Mapping[str, Any]:
    """Takes the medians of DDP's own timers."""
    rows = [row for row in fact.get("timed", ()) if row[0] >= FIRST_TIMED]
    if not rows:
        return fact
    compute, comm, overlap = (float(np.median([row[i] for row in rows])) for i in (1, 2, 3))
    by_pass = {int(row[0]): float(row[1]) for row in rows}
    # A pass without communication was under `no_sync`.
    exposed = {int(row[0]): max(0.0, float(row[2] - row[3])) for row in rows if row[2]}
    return {
        **fact,
        "compute_ns": compute,
        "comm_ns": comm,
        "overlap_ns": overlap,
        "compute_ns_by_pass": by_pass,
        "exposed_ns_by_pass": exposed,
    }


def _passes(log: RankLog) -> float:
    return float(np.median(log.steps[:, COLUMNS.index("backward_passes")]))


def _facts(log: RankLog) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = log.meta.get("facts", {})
    return facts


def _one(fact: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    return [fact] if fact else []


def _with_works(kind: Any, fact: Mapping[str, Any] | None) -> Any:
    """Makes a noun of a fact that has works in it; none where there is no fact."""
    return made(
        kind,
        [
            {**each, **{name: Work(**value) for name, value in each.items() if _is_work(value)}}
            for each in _one(fact)
        ],
    )


def _is_work(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() >= {"num_ops", "flops", "num_bytes"}


def _compiler(fact: Mapping[str, Any]) -> Compiler:
    places = {name: tuple(made(GraphBreak, fact.get(name, ()))) for name in ("breaks", "skipped")}
    compiler: Compiler = next(made(Compiler, [{**fact, **places}]))
    return compiler


def made(kind: Any, facts: Iterable[Mapping[str, Any]]) -> Any:
    """Makes nouns of facts; what a newer version wrote and this one does not know is left out."""
    known = kind.__dataclass_fields__
    for fact in facts:
        told = {name: value for name, value in fact.items() if name in known}
        yield kind(**{n: tuple(value) if isinstance(value, list) else value for n, value in told.items()})
