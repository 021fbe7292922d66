"""Pairs of runs of any two commits, each in a worktree of its own."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from diagnose.core.errors import DiagnoseError
from diagnose.gate.bisection import BisectRequest, Commit
from diagnose.gate.compare_commits import Measure
from diagnose.gate.imports import foreign_sources
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.pairs import BASE, MeasureRun
from diagnose.gate.posterior import CannotRun
from diagnose.gate.result import MeasuredRun, Metric, Pair, Side, TrainingFailed
from diagnose.gate.worktrees import moved_path, worktrees


@dataclass(slots=True, kw_only=True)
class Bench:
    """Makes runs of commits. Holds the worktrees of the last two; `close` removes them.

    Attributes:
        measure: Makes one run.
    """

    request: BisectRequest
    repository: Path
    measure: Measure
    num_runs: int = 0
    _sides: dict[str, tuple[ExitStack, Side]] = field(default_factory=dict)

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keep()

    def ends(self, good: Commit, bad: Commit) -> MeasureRun:
        """Returns what `run_pairs` makes its runs with; the good commit is the base."""

        def run(side: int, name: str, plan: RunPlan) -> MeasuredRun:
            self._keep(good, bad)
            return self._run(good if side == BASE else bad, plan)

        return run

    def pair(self, one: Commit, other: Commit, plan: RunPlan) -> Pair:
        """Makes a run of each, the other one first every second time.

        Raises:
            CannotRun: If the second one does not run, or does not train.
            TrainingFailed: If the first one does not run any more.
        """
        self._keep(one, other)
        base_first = self.num_runs // 2 % 2 == 0
        made: dict[str, MeasuredRun] = {}
        for commit in (one, other) if base_first else (other, one):
            try:
                made[commit.hash] = self._run(commit, plan)
            except TrainingFailed as failure:
                if commit is one:
                    raise
                raise CannotRun(failure.reason) from failure
            except OutOfTime as late:
                if commit is one:
                    raise
                raise CannotRun(f"it did not end in {plan.timeout_s:.0f} s") from late
        return Pair(base=made[one.hash], head=made[other.hash], base_first=base_first)

    def _run(self, commit: Commit, plan: RunPlan) -> MeasuredRun:
        side = self._side(commit)
        self.num_runs += 1
        run = self.measure(side, f"run-{self.num_runs:03d}-{commit.hash[:9]}", self.request.folder, plan)
        if self.num_runs == 1:
            foreign = foreign_sources(run.folder, self.repository)
            if foreign:
                raise DiagnoseError(
                    f"bisect: the run in a worktree used {foreign[0]}, of the working copy: all versions\n"
                    "would run the same code (an editable installation?). Import from the worktree:\n"
                    f"PYTHONPATH={Path(foreign[0]).parents[1]} diagnose bisect ... (moved to each worktree)"
                )
        return run

    def _side(self, commit: Commit) -> Side:
        if commit.hash not in self._sides:
            stack = ExitStack()
            (root,) = stack.enter_context(worktrees(self.repository, (commit.hash,), self.request.links))
            self._sides[commit.hash] = (stack, self._side_in(root, commit))
        return self._sides[commit.hash][1]

    def _side_in(self, root: Path, commit: Commit) -> Side:
        folder = root / self.request.cwd.resolve().relative_to(self.repository.resolve())
        path = os.environ.get("PYTHONPATH", "")
        return Side(
            label="head",
            name=commit.hash[:9],
            commit=commit.hash,
            root=folder,
            command=self.request.command,
            environment={"PYTHONPATH": moved_path(path, self.repository, root)} if path else {},
        )

    def _keep(self, *commits: Commit) -> None:
        """Removes the worktrees of all others."""
        kept = {commit.hash for commit in commits}
        for name in [name for name in self._sides if name not in kept]:
            self._sides.pop(name)[0].close()


def log_cost(pair: Pair, metric: Metric) -> float:
    """Returns the logarithm of what the second run's work cost over the first one's.

    Raises:
        CannotRun: If a run has no such figure: it trained too little.
    """
    one, other = pair.base.figures.get(metric, 0.0), pair.head.figures.get(metric, 0.0)
    if min(one, other) <= 0:
        raise CannotRun(f"no {metric.label} was measured")
    return math.log(one / other) if metric.more_is_better else math.log(other / one)
