"""`diagnose bisect`: which commit between a fast one and a slow one lost the speed."""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.gate.bench import Bench
from diagnose.gate.bisection import Bisection, BisectRequest, Commit, Ending
from diagnose.gate.compare_commits import Measure, second_look, sigterm_unwinds
from diagnose.gate.judging import has_figure, judge, log_cost
from diagnose.gate.measure import OutOfTime, RunPlan, measured_run
from diagnose.gate.pairs import Progress, counted, run_pairs
from diagnose.gate.posterior import CannotRun, OutOfBudget, lost_in_parts, search
from diagnose.gate.result import Metric, Pair, TrainingFailed, Verdict
from diagnose.gate.why import reasons, why_of
from diagnose.gate.worktrees import (
    NotInThisVersion,
    commit_of,
    git,
    note_of_submodules,
    parse_range,
    parted_at,
    refuse_working_copy,
    renamed_files,
    repository_of,
)

WHY_PAIRS = 7
"""Pairs of the commit found and its parent: as many as the gate needs for a verdict."""

ENDS_PART = 0.5
"""Part of the budget that the two ends may take; the other half is for what is between them."""

HANGS = 10.0
"""A commit whose run takes so many times as long as the slower end's hangs, and is left out."""

LEAST_TIMEOUT_S = 60.0
"""Nothing is said to hang before: another commit may have something to compile or to download first."""


def bisect(
    request: BisectRequest, *, measure: Measure = measured_run, progress: Progress = lambda text: None
) -> Bisection:
    """Finds the commit that lost the speed.

    Raises:
        DiagnoseError: If there are no such commits, or nothing lies between them.
    """
    begun = time.monotonic()
    repository = repository_of(request.cwd)
    refuse_working_copy(repository, request.command)
    good, commits = row_of_commits(repository, request.commits)
    found = Bisection(
        ending=Ending.CANNOT_TELL,
        good=good,
        commits=commits,
        notes=note_of_submodules(repository, good.hash, commits[-1].hash, request.links),
        folder=request.folder,
    )
    ends_at = begun + request.asked.budget_s
    bench = Bench(request=request, repository=repository, measure=measure, ends_at=ends_at)
    with sigterm_unwinds(), closing(bench):
        job = _Search(request=request, bench=bench, progress=progress)
        try:
            found = job.run(found)
        except (TrainingFailed, OutOfTime) as failure:
            found = _ended_by(failure, found)
    return replace(found, wall_s=time.monotonic() - begun)


def _ended_by(failure: TrainingFailed | OutOfTime, found: Bisection) -> Bisection:
    """Returns the search with how it ended, where one of its ends does not run."""
    if isinstance(failure, OutOfTime):
        return replace(found, reason=f"{found.good.hash[:9]} ran before and hangs now")
    words = "\n".join((str(failure), *failure.failure.last_lines))
    return replace(found, ending=Ending.FAILED, reason=words)


def row_of_commits(repository: Path, text: str) -> tuple[Commit, tuple[Commit, ...]]:
    """Returns the good commit, and those after it up to the bad one, oldest first.

    Of merges only the branch merged into is followed.

    Raises:
        DiagnoseError: If the good one is no ancestor of the bad one, or the same.
    """
    good, bad = (commit_of(repository, name) for name in parse_range(text))
    parted = parted_at(repository, good, bad)
    if parted != good:
        raise DiagnoseError(
            f"bisect: {text}: the first is no ancestor of the second, so nothing leads from one to the "
            f"other.\nBegin where they parted: {parted[:12]}"
        )
    commits = _logged(repository, "--first-parent", "--reverse", f"{good}..{bad}")
    if not commits:
        raise DiagnoseError(f"bisect: {text}: that is one and the same commit; name a slower, later one.")
    before = git(repository, "rev-parse", f"{commits[0].hash}^").strip()
    if before != good:
        # What the branch did not have yet, it is not slow for lack of.
        raise DiagnoseError(
            f"bisect: {text}: the first came to the second's branch by a merge, and what came before the "
            f"merge is not built on it.\nBegin where the branch does: {before[:12]}"
        )
    return _logged(repository, "--max-count=1", good)[0], commits


def _logged(repository: Path, *which: str) -> tuple[Commit, ...]:
    """Reads commits; whatever the subjects hold, and whatever else the user's git shows in a log."""
    text = git(repository, "log", "-z", "--no-show-signature", "--format=%H%x09%P%x09%s", *which)
    rows = [row.split("\t", 2) for row in text.split("\0") if row]
    return tuple(Commit(hash=name, subject=subject, is_merge=" " in of) for name, of, subject in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One search under way."""

    request: BisectRequest
    bench: Bench
    progress: Progress

    def run(self, found: Bisection) -> Bisection:
        """Measures the ends, then what is between them, then the commit found and its parent."""
        asked = self.request.asked
        half = replace(asked, budget_s=ENDS_PART * asked.budget_s)
        ends = run_pairs(self.bench.ends(found.good, found.commits[-1]), half, progress=self.progress)
        self.bench.longest_s = max((run.wall_s for run in counted(ends.runs)), default=0.0)
        judgement, why = second_look(asked.metric, ends)
        found = replace(found, ends=judgement, notes=(*found.notes, *filter(None, [why])))
        if judgement.verdict is Verdict.PASS:
            return replace(found, ending=Ending.NO_LOSS, reason="the last commit is not slower")
        if judgement.verdict is not Verdict.REGRESSION:
            return replace(found, reason=ends.stopped or judgement.reason)
        metric, last = judgement.metric, ends.runs[-1]
        timeout_s = max(LEAST_TIMEOUT_S, HANGS * max(run.wall_s for run in ends.runs))
        plan = RunPlan(steps=last.num_steps, warmup=last.warmup, timeout_s=timeout_s)
        logs_of_ends = [log_cost(pair, metric) for pair in ends.pairs if has_figure(pair, metric)]
        failures: list[TrainingFailed | OutOfTime] = []

        def log_of(index: int) -> float:
            try:
                return self._log_of_pair(found, index, plan, metric)
            except (TrainingFailed, OutOfTime) as failure:  # what was measured so far is kept
                failures.append(failure)
                raise OutOfBudget from failure

        odds = search(
            len(found.commits),
            log_of,
            ends=logs_of_ends,
            confidence=self.request.confidence,
            may_go_on=lambda odds: odds.num_pairs < self.request.max_pairs,
        )
        suspects, certainty = odds.suspects()
        found = replace(found, odds=odds, suspects=suspects)
        if failures:
            return _ended_by(failures[0], found)
        if certainty < self.request.confidence:
            part = lost_in_parts(odds, logs_of_ends)
            if part is not None:
                return replace(found, reason=_in_parts(found, part))
            wanted = f"{self.request.confidence:.0%}"
            return replace(found, reason=f"after {odds.num_pairs} pairs no commit has odds of {wanted}")
        return self._explained(replace(found, ending=Ending.FOUND), ends.pairs, plan, metric)

    def _log_of_pair(self, found: Bisection, index: int, plan: RunPlan, metric: Metric) -> float:
        commit = found.commits[index]
        try:
            pair = self._pair(found.good, commit, plan)
            if not has_figure(pair, metric):  # it trained too little
                raise CannotRun(f"no {metric.label} was measured")
        except CannotRun as error:
            self.progress(f"{commit.hash[:9]} cannot be measured ({error}); left out")
            raise
        log = log_cost(pair, metric)
        self.progress(f"{commit.hash[:9]} costs {math.expm1(log):+.1%}: {commit.subject}")
        return log

    def _pair(self, one: Commit, other: Commit, plan: RunPlan) -> Pair:
        """Makes a pair, a second time where the first commit, which ran before, does not now."""
        try:
            return self.bench.pair(one, other, plan)
        except (TrainingFailed, OutOfTime) as failure:
            self.progress(f"{one.hash[:9]} did not run now ({_words(failure)}); once more")
            return self.bench.pair(one, other, plan)

    def _explained(
        self, found: Bisection, ends: tuple[Pair, ...], plan: RunPlan, metric: Metric
    ) -> Bisection:
        """Sets the commit found beside its parent; of several, the last beside the first one's parent."""
        first, last = found.suspects[0], found.suspects[-1]
        before = found.commits[first - 1] if first else found.good
        pairs = ends
        if len(found.commits) > 1:  # else the ends are these two, and their worktrees still stand
            self.progress(f"{found.commits[last].hash[:9]} it is; measuring it beside its parent")
            made: list[Pair] = []
            try:
                while len(made) < WHY_PAIRS:
                    made.append(self._pair(before, found.commits[last], plan))
            except (CannotRun, TrainingFailed, OutOfTime, NotInThisVersion) as error:
                note = f"it could not be measured beside its parent: {_words(error)}"
                return replace(found, notes=(*found.notes, note))
            except OutOfBudget:
                note = f"the budget was used up after {len(made)} of {WHY_PAIRS} pairs with its parent"
                return replace(found, notes=(*found.notes, note))
            pairs = tuple(made)
        judgement = judge(pairs, metric, self.request.asked.max_drop, last=True)
        found = replace(found, parent=judgement)
        if judgement is None or judgement.verdict is Verdict.PASS:
            reason = "the most likely commit is not slower than its parent, once measured beside it"
            return replace(found, ending=Ending.CANNOT_TELL, reason=reason)
        renamed = renamed_files(self.bench.repository, before.hash, found.commits[last].hash)
        return replace(found, why=tuple(reasons(why_of(pairs, metric, renamed=renamed), metric)))


def _in_parts(found: Bisection, part: int) -> str:
    good, between, bad = (
        commit.hash[:12] for commit in (found.good, found.commits[part], found.commits[-1])
    )
    return (
        f"the speed was lost in more than one commit: {between} has lost but a part of it. "
        f"Search both sides: {good}..{between} and {between}..{bad}"
    )


def _words(error: Exception) -> str:
    return str(error) or "it did not end in time"
