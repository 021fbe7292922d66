"""The gate's result for programs. Versioned: a key once published keeps its meaning."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from diagnose.gate.result import GateResult, Judgement, MeasuredRun, Side
from diagnose.report._json import finite

SCHEMA = 1


def to_json(result: GateResult) -> dict[str, Any]:
    """Returns the result as the JSON object of schema 1: every key always there, every number finite.

    Drops are parts of base's figure and above 0 where the head is worse. What was not measured is `null`.
    """
    judgement = result.judgement
    answer = {
        "schema": SCHEMA,
        "verdict": result.verdict.value,
        "exit_code": result.verdict.exit_code,
        "metric": result.metric.value,
        "max_drop": result.max_drop,
        "drop": judgement.drop if judgement else None,
        "drop_ci95": [judgement.low, judgement.high] if judgement else None,
        "standard_error": judgement.error if judgement else None,
        "detectable_drop": judgement.detectable if judgement else None,
        "pairs": judgement.pairs if judgement else 0,
        "base": judgement.base if judgement else None,
        "head": judgement.head if judgement else None,
        "judgements": [_judgement(each) for each in (judgement, *result.beside) if each is not None],
        "sides": [_side(side) for side in result.sides],
        "runs": [_run(run, result) for run in result.runs],
        "causes": result.causes,
        "advice": result.advice,
        "why": [asdict(reason) for reason in result.why],
        "failure": asdict(result.failure) if result.failure else None,
        "fingerprint": result.fingerprint,
        "notes": result.notes,
        "folder": str(result.folder) if result.folder else None,
        "wall_s": result.wall_s,
    }
    finished: dict[str, Any] = finite(answer)
    return finished


def _judgement(judgement: Judgement) -> dict[str, Any]:
    return {**asdict(judgement), "metric": judgement.metric.value, "verdict": judgement.verdict.value}


def _side(side: Side) -> dict[str, Any]:
    return {
        "label": side.label,
        "name": side.name,
        "commit": side.commit or None,
        "command": side.command,
    }


def _run(run: MeasuredRun, result: GateResult) -> dict[str, Any]:
    number = next(
        (n for n, pair in enumerate(result.pairs, 1) if run.name in (pair.base.name, pair.head.name)), None
    )
    return {
        "name": run.name,
        "pair": number,
        "figures": {metric.value: value for metric, value in run.figures.items()},
        "steps": run.num_steps,
        "warmup": run.warmup,
        "ranks": run.ranks,
        "missing_ranks": run.missing_ranks,
        "wall_s": run.wall_s,
        "machine": asdict(run.machine),
    }
