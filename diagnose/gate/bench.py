"""Pairs of runs of any two commits, each in a worktree of its own."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.gate.bisection import BisectRequest, Commit
from diagnose.gate.compare_commits import Measure
from diagnose.gate.imports import why_same_code
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.pairs import BASE, MeasureRun
from diagnose.gate.posterior import CannotRun, OutOfBudget
from diagnose.gate.ranks_read import why_other_ranks
from diagnose.gate.result import MeasuredRun, Pair, Side, TrainingFailed
from diagnose.gate.sides import in_worktree
from diagnose.gate.steps import MIN_STEPS
from diagnose.gate.worktrees import NotInThisVersion, inside_repository, worktrees


@dataclass(slots=True, kw_only=True)
class Bench:
    """Makes runs of commits. Holds the worktrees of the last two; `close` removes them.

    Attributes:
        measure: Makes one run.
        ends_at: When the budget is used up, on the monotonic clock; infinite for never.
        longest_s: The longest run so far, of those that are as long as further ones.
    """

    request: BisectRequest
    repository: Path
    measure: Measure
    ends_at: float = math.inf
    longest_s: float = 0.0
    num_runs: int = 0
    num_pairs: int = 0
    _sides: dict[str, tuple[ExitStack, Side]] = field(default_factory=dict)

    def close(self) -> None:
        """Removes the worktrees."""
        self._keep()

    def ends(self, good: Commit, bad: Commit) -> MeasureRun:
        """Returns what `run_pairs` makes its runs with, rehearsals too; the good commit is the base."""

        def run(side: int, name: str, plan: RunPlan) -> MeasuredRun:
            self._keep(good, bad)
            return self._run(good if side == BASE else bad, plan)

        return run

    def pair(self, one: Commit, other: Commit, plan: RunPlan) -> Pair:
        """Makes a run of each, the other one first every second time.

        Raises:
            CannotRun: If the second one does not run, or does not train, or on other ranks.
            TrainingFailed: If the first one does not run any more.
            OutOfBudget: If there is no time left for it.
        """
        self._keep(one, other)
        base_first = self.num_pairs % 2 == 0
        self.num_pairs += 1
        for commit in (one, other):
            self._rehearse(commit, one, plan)
        order = (one, other) if base_first else (other, one)
        made = {commit.hash: self._within_budget(commit, one, plan) for commit in order}
        other_ranks = why_other_ranks(made[one.hash], made[other.hash])
        if other_ranks:
            raise CannotRun(other_ranks)
        return Pair(base=made[one.hash], head=made[other.hash], base_first=base_first)

    def _rehearse(self, commit: Commit, one: Commit, plan: RunPlan) -> None:
        """Fills a new worktree's caches of byte code and files by a short run that does not count.

        Else the start of a commit would look the longer, and its work the more, the seldomer it was run.
        """
        if commit.hash not in self._sides:
            self._within_budget(commit, one, replace(plan, steps=MIN_STEPS))

    def _within_budget(self, commit: Commit, one: Commit, plan: RunPlan) -> MeasuredRun:
        """Makes a run that ends with the budget; a failure of another commit than `one` is `CannotRun`."""
        left_s = self.ends_at - time.monotonic()
        if left_s < self.longest_s:
            raise OutOfBudget
        timeout_s = min(left_s, plan.timeout_s)
        try:
            return self._run(commit, replace(plan, timeout_s=timeout_s))
        except OutOfTime as late:
            if left_s < plan.timeout_s:
                raise OutOfBudget from late
            if commit is one:
                raise
            raise CannotRun(f"it did not end in {timeout_s:.0f} s") from late
        except TrainingFailed as failure:
            if commit is one:
                raise
            raise CannotRun(str(failure)) from failure
        except NotInThisVersion as missing:
            if commit is one:
                raise
            _, _, words = str(missing).partition(": ")
            raise CannotRun(words) from missing

    def _run(self, commit: Commit, plan: RunPlan) -> MeasuredRun:
        side = self._side(commit)
        self.num_runs += 1
        run = self.measure(side, f"run-{self.num_runs:03d}-{commit.hash[:9]}", self.request.folder, plan)
        self.longest_s = max(self.longest_s, run.wall_s)
        asked = self.request
        reason = why_same_code("bisect", run.folder, self.repository, side.root, asked.commits, asked.links)
        if reason:
            raise NotInThisVersion(reason)
        return run

    def _side(self, commit: Commit) -> Side:
        if commit.hash not in self._sides:
            with ExitStack() as stack:
                try:
                    (root,) = stack.enter_context(
                        worktrees(self.repository, (commit.hash,), self.request.links)
                    )
                except NotInThisVersion:
                    raise
                except DiagnoseError as error:  # a filter has failed: a large file's object is gone
                    raise NotInThisVersion(str(error)) from error
                side = Side(
                    label="head",
                    name=commit.hash[:9],
                    commit=commit.hash,
                    root=self.request.cwd,
                    folder=inside_repository(self.request.cwd),
                    command=self.request.command,
                )
                side = in_worktree(side, root, self.repository, asker="bisect")
                self._sides[commit.hash] = (stack.pop_all(), side)
        return self._sides[commit.hash][1]

    def _keep(self, *commits: Commit) -> None:
        """Removes the worktrees of all others."""
        kept = {commit.hash for commit in commits}
        for name in [name for name in self._sides if name not in kept]:
            self._sides.pop(name)[0].close()
