"""What the training thread did for the batches that it loaded itself: what it read, and whether the same
samples came out the same again."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from dataclasses import replace

from diagnose.analysis.gaps import measured_samples
from diagnose.analysis.loaders import facts_of, order_of
from diagnose.analysis.opening import MIN_SAMPLED_NS, With
from diagnose.analysis.workers import sightings
from diagnose.core.input import InputStats, OwnLoading
from diagnose.core.ledger import DATA_WAIT
from diagnose.source.calling import callee
from diagnose.source.files import aliases_of, opens_to_write, origin, queries_of, writes_table
from diagnose.source.names import words
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame, RankLog

READERS = """
    execute extractfile fetchall fetchmany fetchone
    fromfile memmap open pread read read_bytes read_text readinto readline readlines
"""
"""Names of what opens a file or reads it, a data base's rows included, and decodes nothing."""

READS = frozenset(READERS.split())
READS_OF = frozenset(
    {
        *((package, "load") for package in ("joblib", "numpy", "pickle", "torch")),
        ("h5py", "File"),
        ("linecache", "getline"),
        ("sqlite3", "connect"),
        ("tarfile", "TarFile"),
        ("zipfile", "ZipFile"),
    }
)
"""Likewise, with the package: `load` alone is anything. Some take apart what they read; whether that is
what takes the time is told by the system calls and bytes."""

DATABASES = {
    *("con", "conn", "connect", "connection", "cur", "cursor"),
    *("database", "db", "session", "sql", "sqlite", "sqlite3"),
}
"""Words of what answers by `execute` from a data base; a pipeline and a plan have a method of that name."""

ARCHIVES = ("TarFile", "ZipFile")

DECODES = "Image"
"""What is opened by this module is a picture, and taking it apart is most of the work."""


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
    own = OwnLoading(
        samples=counters.get("collated_samples", 0) / collates or None if collates else None,
        reads=counters["reads"] / looked if looked else None,
        read_bytes=counters["read_bytes"] / looked if looked else None,
        made_bytes=counters["made_bytes"] / sized if sized else None,
        reading_share=reading_share(stacks, sources),
        repeated=repeated,
        varied=varied,
    )
    return replace(stats, own=own)


def reading_share(stacks: Iterable[tuple[tuple[Frame, ...], float]], sources: Sources) -> float | None:
    """Returns the part of the sampled time in lines that read files, 0 to 1; `None` where samples are too
    few.

    Args:
        stacks: Sampled stacks of loading, a package's frame first, and nanoseconds.
        sources: Where the script's text is read.
    """
    whole = reading = 0.0
    known: dict[str, frozenset[int]] = {}
    for (_, *stack), weight_ns in stacks:
        whole += weight_ns
        if not stack:
            continue
        file, line, _ = stack[0]
        if file not in known:
            known[file] = reading_lines(sources.tree(file))
        reading += weight_ns * (line in known[file])
    return reading / whole if whole >= MIN_SAMPLED_NS else None


def reading_lines(tree: ast.Module | None) -> frozenset[int]:
    """Returns the lines of a file that read another one, or work on it while it is open:
    `with open(path) as file: text = file.read()`."""
    if tree is None:
        return frozenset()
    aliases, queries = aliases_of(tree), queries_of(tree)
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, With):
            calls = [call for item in node.items for call in ast.walk(item.context_expr)]
        elif isinstance(node, ast.Call):
            calls = [node]
        else:
            continue
        if any(isinstance(call, ast.Call) and _reads(call, aliases, queries) for call in calls):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(found)


def _reads(call: ast.Call, aliases: dict[str, str], queries: Collection[str]) -> bool:
    package, name = origin(call, aliases)
    if opens_to_write(call) or writes_table(call, name, queries):
        return False
    if name in ARCHIVES and _mode_of(call) != "r":
        return False
    if name == "execute" and not words(callee(call)[1]) & DATABASES:
        return False
    if (package, name) in READS_OF:
        return True
    decodes = callee(call)[1].rpartition(".")[2] == DECODES or package.rpartition(".")[2] == DECODES
    return name in READS and not decodes


def _mode_of(call: ast.Call) -> str:
    """Returns the mode of an archive that is opened, `r` where it is not written out there."""
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return str(texts[0]) if texts else "r"
