"""The ranks of a run, each made a summary of and let go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diagnose.analysis.across import Across
from diagnose.analysis.rank_summary import RankSummary, Window, summarize
from diagnose.analysis.roles import Sources
from diagnose.store.reader import RankLog


@dataclass(slots=True, kw_only=True)
class Reduced:
    """Some ranks of a run.

    Attributes:
        ranks: The ranks that recorded steps, by their place among the files of all.
        across: Their steps side by side; `None` without a rank.
        damage: What could not be read, by place.
    """

    ranks: dict[int, RankSummary] = field(default_factory=dict)
    across: Across | None = None
    damage: dict[int, list[str]] = field(default_factory=dict)

    def fold(self, other: Reduced) -> None:
        """Takes other ranks in; `other` is used up."""
        self.ranks |= other.ranks
        self.damage |= other.damage
        if self.across is None:
            self.across = other.across
        elif other.across is not None:
            self.across.fold(other.across)


def reduce_logs(logs: Iterable[tuple[int, RankLog]], window: Window, sources: Sources) -> Reduced:
    """Summarizes ranks, each given with its place."""
    reduced = Reduced()
    for place, log in logs:
        summary, across = summarize(log, place, window, sources)
        reduced.fold(Reduced(ranks={place: summary}, across=across))
    return reduced
