"""The ranks of a run side by side: where they meet, who is late there, and what only all of them tell."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from diagnose.analysis.imbalance import imbalance_of
from diagnose.analysis.late_bins import late_ranks
from diagnose.analysis.lateness import lateness
from diagnose.analysis.program import with_call
from diagnose.analysis.rank_clocks import clock_offset
from diagnose.analysis.rank_summary import Window, meet_in_all, why_incomparable, with_idleness
from diagnose.analysis.reduction import Reduced
from diagnose.core.history import LateRanks
from diagnose.core.profile import RankProfile
from diagnose.core.program import Program
from diagnose.source.sources import Sources


class SideBySide:
    """Compares the ranks.

    Args:
        reduced: All that were looked at, the first one among them.
        program: What the first one trains with, as it alone tells.

    Attributes:
        ranks: Their summaries, in order of their places.
        untold: Why their times do not tell which of them the others wait for; empty where they do.
    """

    def __init__(self, reduced: Reduced, program: Program) -> None:
        assert reduced.across is not None, "the first rank is one of them"
        self._places = sorted(reduced.ranks)
        self._across = reduced.across
        self._program = program
        self._numbers = {place: reduced.ranks[place].rank for place in self._places}
        self.ranks = [reduced.ranks[place] for place in self._places]
        self._meetings = self._across.waits.meetings(self._numbers)
        by_meetings = self._meetings is not None
        in_all = meet_in_all(self.ranks, program, by_meetings=by_meetings)
        self._gatherings = self._across.meets.meetings(self._numbers) if in_all else None
        self.untold = why_incomparable(self.ranks, by_meetings=by_meetings)

    def profiles(self) -> tuple[RankProfile, ...]:
        """Returns each rank beside the others."""
        ranks = self.ranks
        late_ns: list[float | None] = [None] * len(ranks)
        if not self.untold:
            late_ns = lateness([rank.phase_time_ns for rank in ranks], self._meetings or self._gatherings)
        late_shares = self._across.late_shares(self._places)
        return tuple(
            RankProfile(
                rank=rank.rank,
                host=rank.host,
                phase_time_ns=rank.phase_time_ns,
                standing_ns=rank.standing_ns,
                working_ns=rank.working_ns,
                gathering_ns=rank.gathering_ns,
                exchanged_ns=rank.exchanged_ns,
                averaged_ns=rank.averaged_ns,
                late_ns_per_step=late,
                late_share=late_share,
                stats=rank.stats,
                clock=clock_offset(ranks[0].met_ns, rank.met_ns),
            )
            for rank, late, late_share in zip(ranks, late_ns, late_shares, strict=True)
        )

    def late_ranks(self, window: Window) -> LateRanks | None:
        """Returns how late each rank is in each part of the steps, where that is told."""
        if self.untold:
            return None
        met = None
        if self._meetings is not None:
            met = self._across.waits
        elif self._gatherings is not None:
            met = self._across.meets
        first, _ = window.part or (0, None)
        return late_ranks(
            [rank.rank for rank in self.ranks],
            [rank.waits_ns for rank in self.ranks],
            met,
            first + window.warmup,
            window.bin_width,
        )

    def program(self, sources: Sources) -> Program:
        """Returns the program with what all ranks tell of how they train together."""
        exchanges = any(rank.exchanged_ns for rank in self.ranks)
        by_rank = sorted(self.ranks, key=lambda rank: rank.rank)
        ddp = (replace(rank.ddp, rank=rank.rank) for rank in by_rank if rank.ddp is not None)
        return replace(
            self._program,
            ddp=with_call(sources, ddp),
            pipeline=with_idleness(self._program.pipeline, self.ranks),
            imbalance=imbalance_of(self._across, self._numbers),
            meetings=self._meetings,
            gatherings=self._gatherings,
            collective_ns=self._across.collective_ns(exchanges=exchanges),
            collective_share=self._across.collective_share(exchanges=exchanges),
        )

    def events(self) -> dict[str, int]:
        """Returns how often each kind of event happened, on all ranks."""
        return dict(sum((Counter(rank.events) for rank in self.ranks), Counter()))
