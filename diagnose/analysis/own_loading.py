"""What the training thread did for the batches that it loaded itself: what it read, and whether the same
samples came out the same again."""

from __future__ import annotations

from dataclasses import replace

from diagnose.analysis.gaps import measured_samples
from diagnose.analysis.loaders import facts_of, order_of
from diagnose.analysis.reading import reading_shares
from diagnose.analysis.workers import sightings
from diagnose.core.input import InputStats, OwnLoading
from diagnose.core.ledger import DATA_WAIT
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog


def with_own_loading(stats: InputStats, log: RankLog, warmup: int, sources: Sources) -> InputStats:
    """Adds what the training thread did, if it loads.

    Args:
        stats: What is known of the loaders.
        log: One rank's records.
        warmup: Leading steps whose samples are left out.
        sources: Where the text of a line is read.
    """
    main = order_of(log)[:1]
    if not main or facts_of(log)[main[0]].get("num_workers"):
        return stats
    counters, facts = log.meta.get("counters", {}), log.meta.get("facts", {})
    looked, collates = counters.get("read_batches", 0), counters.get("collates", 0)
    sized = counters.get("made_batches", 0)
    of_main = [[index, sum_] for number, index, sum_ in facts.get("own_sightings", ()) if number == main[0]]
    repeated, varied = sightings([{"sightings": of_main}])
    stacks = (
        (stack, weight_ns) for slot, stack, weight_ns in measured_samples(log, warmup) if slot == DATA_WAIT
    )
    shares = reading_shares(stacks, sources)
    own = OwnLoading(
        samples=counters.get("collated_samples", 0) / collates or None if collates else None,
        reads=counters["reads"] / looked if looked else None,
        read_bytes=counters["read_bytes"] / looked if looked else None,
        made_bytes=counters["made_bytes"] / sized if sized else None,
        reading_share=shares.reading,
        asking_share=shares.asking,
        repeated=repeated,
        varied=varied,
    )
    return replace(stats, own=own)
