"""The steps of a run as a table of pandas, for whoever wants to look at them in a way of their own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diagnose.analysis.reduction import read_or_note
from diagnose.analysis.spans import rank_of
from diagnose.analysis.steps import phase_series, step_times, warmup_of
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS, NS_PER_S
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog
from diagnose.store.runs import rank_files, read_manifest, resolve_run

if TYPE_CHECKING:
    import pandas as pd


def read_steps(run: str | Path) -> pd.DataFrame:
    """Reads every step of a run, finished or not, by the device's clock where the run has it.

    Args:
        run: The run's folder.

    Returns:
        A row for each step of each rank, with these columns:

        - `rank`, and `step`, from 0;
        - `warmup`: whether it is one of the first steps, which no figure of a report is of;
        - `end_s`: seconds from the end of the rank's first step to the end of this one;
        - `step_ms`: milliseconds that it took;
        - `data_wait_ms`, `forward_ms`, ...: those of each phase that took any time in the run; they sum to
          `step_ms`. What lies between two hooks is divided as the lines sampled in all steps divide it;
        - `samples`, `tokens`, `backward_passes`: how many it had; 0 where nothing tells.

        What cannot be read of a damaged file is missing, and said in a warning.

    Raises:
        DiagnoseError: If the folder holds no run, or one of a newer version.
    """
    import pandas as pd

    folder = resolve_run(str(Path(run).absolute()), Path())
    manifest, tables = read_manifest(folder), []
    for path in rank_files(folder):
        log, damage = read_or_note(path)
        for note in damage:
            warnings.warn(note, stacklevel=2)
        if log is not None and len(log.steps):
            tables.append(_of_rank(log, warmup_of(manifest, log)))
    if not tables:
        return _without_steps()
    table: pd.DataFrame = pd.concat(tables).sort_values(["rank", "step"], kind="stable", ignore_index=True)
    phases = [_named(phase) for phase in Phase]
    used: pd.DataFrame = table.drop(columns=[name for name in phases if not table[name].any()])
    return used


def _of_rank(log: RankLog, warmup: int) -> pd.DataFrame:
    import pandas as pd

    rows = log.steps
    end_ns = rows[:, COLUMNS.index("end_ns")]
    roles = Roles(log.sites, Sources(log.sources), log.samples)
    table: pd.DataFrame = pd.DataFrame(
        {
            "rank": rank_of(log),
            "step": np.arange(len(rows)),
            "warmup": np.arange(len(rows)) < warmup,
            "end_s": (end_ns - end_ns[:1]) / NS_PER_S,
            "step_ms": step_times(rows) / NS_PER_MS,
            **{
                _named(phase): time_ns / NS_PER_MS
                for phase, time_ns in phase_series(log, rows, warmup, roles).items()
            },
            **{name: rows[:, COLUMNS.index(name)] for name in ("samples", "tokens", "backward_passes")},
        }
    )
    return table


def _without_steps() -> pd.DataFrame:
    empty = RankLog(path=Path(), steps=np.empty((0, len(COLUMNS)), dtype=np.int64))
    return _of_rank(empty, 0)


def _named(phase: Phase) -> str:
    return f"{phase.value}_ms"
