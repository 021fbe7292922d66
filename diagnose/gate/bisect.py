"""`diagnose bisect`: which commit between a fast one and a slow one lost the speed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.gate.bench import Bench, log_cost
from diagnose.gate.bisection import Bisection, BisectRequest, Commit, Ending
from diagnose.gate.compare_commits import Measure, sigterm_unwinds
from diagnose.gate.measure import OutOfTime, RunPlan, measured_run
from diagnose.gate.pairs import Progress, judge, run_pairs
from diagnose.gate.posterior import CannotRun, Odds, search
from diagnose.gate.result import Metric, Pair, TrainingFailed, Verdict
from diagnose.gate.why import reasons, why_of
from diagnose.gate.worktrees import commit_of, git, parse_range, repository_of

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
    good, commits = row_of_commits(repository, request.commits)
    found = Bisection(ending=Ending.CANNOT_TELL, good=good, commits=commits, folder=request.folder)
    with (
        sigterm_unwinds(),
        Bench(request=request, repository=repository, measure=measure) as bench,
    ):
        job = _Search(request=request, bench=bench, progress=progress, begun=begun)
        try:
            found = job.run(found)
        except TrainingFailed as failure:
            words = "\n".join((failure.reason, *failure.last_lines))
            found = replace(found, ending=Ending.FAILED, reason=words)
        except OutOfTime:
            found = replace(found, reason=f"{good.hash[:9]} ran before and hangs now")
    return replace(found, wall_s=time.monotonic() - begun)


def row_of_commits(repository: Path, text: str) -> tuple[Commit, tuple[Commit, ...]]:
    """Returns the good commit, and those after it up to the bad one, oldest first.

    Of merges only the branch merged into is followed.

    Raises:
        DiagnoseError: If the good one is no ancestor of the bad one, or the same.
    """
    good, bad = (commit_of(repository, name) for name in parse_range(text))
    if git(repository, "merge-base", good, bad) != good:
        raise DiagnoseError(
            f"bisect: {text}: the first is no ancestor of the second, so nothing leads from one to the "
            f"other.\nBegin where they parted: {git(repository, 'merge-base', good, bad)[:12]}"
        )
    lines = git(
        repository, "log", "--first-parent", "--reverse", "--format=%H%x09%P%x09%s", f"{good}..{bad}"
    ).splitlines()
    commits = []
    for line in lines:
        name, parents, subject = line.split("\t", 2)
        commits.append(Commit(hash=name, subject=subject, is_merge=" " in parents))
    if not commits:
        raise DiagnoseError(f"bisect: {text}: that is one and the same commit; name a slower, later one.")
    subject = git(repository, "log", "-1", "--format=%s", good)
    return Commit(hash=good, subject=subject), tuple(commits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One search under way."""

    request: BisectRequest
    bench: Bench
    progress: Progress
    begun: float

    def run(self, found: Bisection) -> Bisection:
        """Measures the ends, then what is between them, then the commit found and its parent."""
        asked = self.request.asked
        if asked.budget_s is not None:
            asked = replace(asked, budget_s=ENDS_PART * asked.budget_s)
        ends = run_pairs(self.bench.ends(found.good, found.commits[-1]), asked, progress=self.progress)
        found = replace(found, ends=ends.judgement)
        if ends.judgement.verdict is Verdict.PASS:
            return replace(found, ending=Ending.NO_LOSS, reason="the last commit is not slower")
        if ends.judgement.verdict is not Verdict.REGRESSION:
            return replace(found, reason=ends.stopped or ends.judgement.reason)
        metric, last = ends.judgement.metric, ends.runs[-1]
        timeout_s = max(LEAST_TIMEOUT_S, HANGS * max(run.wall_s for run in ends.runs))
        plan = RunPlan(steps=last.num_steps, warmup=last.warmup, timeout_s=timeout_s)
        odds = search(
            len(found.commits),
            lambda index: self._log_of_pair(found, index, plan, metric),
            ends=[log_cost(pair, metric) for pair in ends.pairs],
            confidence=self.request.confidence,
            may_go_on=self._may_go_on,
        )
        suspects, certainty = odds.suspects()
        found = replace(found, odds=odds, suspects=suspects)
        if certainty < self.request.confidence:
            wanted = f"{self.request.confidence:.0%}"
            return replace(found, reason=f"after {odds.num_pairs} pairs no commit has odds of {wanted}")
        return self._explained(replace(found, ending=Ending.FOUND), ends.pairs, plan, metric)

    def _may_go_on(self, odds: Odds) -> bool:
        budget_s = self.request.asked.budget_s
        has_time = budget_s is None or time.monotonic() - self.begun < budget_s
        return odds.num_pairs < self.request.max_pairs and has_time

    def _log_of_pair(self, found: Bisection, index: int, plan: RunPlan, metric: Metric) -> float:
        commit = found.commits[index]
        try:
            pair = self.bench.pair(found.good, commit, plan)
            log = log_cost(pair, metric)
        except CannotRun as error:
            self.progress(f"{commit.hash[:9]} cannot be measured ({error}); left out")
            raise
        self.progress(f"{commit.hash[:9]} costs {math.expm1(log):+.1%}: {commit.subject}")
        return log

    def _explained(
        self, found: Bisection, ends: tuple[Pair, ...], plan: RunPlan, metric: Metric
    ) -> Bisection:
        """Sets the commit found beside its parent; of several, the last beside the first one's parent."""
        first, last = found.suspects[0], found.suspects[-1]
        before = found.commits[first - 1] if first else found.good
        pairs = ends
        if first or last < len(found.commits) - 1:  # else the ends are these two
            self.progress(f"{found.commits[last].hash[:9]} it is; measuring it beside its parent")
            try:
                pairs = tuple(self.bench.pair(before, found.commits[last], plan) for _ in range(WHY_PAIRS))
            except CannotRun as error:
                return replace(found, reason=f"beside its parent it did not run: {error}")
        judgement = judge(pairs, metric, self.request.asked.max_drop, last=True)
        found = replace(found, parent=judgement)
        if judgement is None or judgement.verdict is Verdict.PASS:
            reason = "the most likely commit is not slower than its parent, once measured beside it"
            return replace(found, ending=Ending.CANNOT_TELL, reason=reason)
        return replace(found, why=tuple(reasons(why_of(pairs, metric), metric)))
