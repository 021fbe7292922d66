"""What workers read: which of their time passes where files are opened."""

from __future__ import annotations

from typing import Any

from diagnose.analysis.opening import reading_of
from diagnose.core.input import Reading
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame

FILE = "/home/u/data.py"
SOURCE = """
class Tiles:
    def __getitem__(self, row):
        tiles = []
        for path in self.paths[row]:
            with open(path, "rb") as file:
                raw = file.read()
                tiles.append(parsed(raw))
        image = stacked(tiles)
        name = looked_up(self.names[row])
        return augmented(image), name
"""
GETS = "Tiles.__getitem__"
NO_PACKAGE: Frame = ("", 0, "")
SECOND = 1_000_000_000


def at(line: int, function: str = GETS) -> Frame:
    return FILE, line, function


def report(**told: Any) -> dict[str, Any]:
    return {
        "opened": [2, 8, 136, 4000, 400, 600],
        "opening": [[list(at(6)), 128], [list(at(10)), 8]],
        **told,
    }


def read(reports: list[dict[str, Any]], samples: dict[Frame, int]) -> Reading | None:
    stacks = [((NO_PACKAGE, frame), weight) for frame, weight in samples.items()]
    return reading_of(reports, stacks, Sources({FILE: SOURCE}))


def test_reading_is_where_files_are_opened_and_what_is_done_while_they_are_open():
    samples = {at(6): 3 * SECOND, at(7): 2 * SECOND, at(9): 4 * SECOND, at(10): SECOND}
    found = read([report(), report()], samples)
    assert found == Reading(
        opens=68, reads=300, samples=4, read_bytes=2000, made_bytes=200, share=0.6, asking_share=0.0
    )


def test_lines_that_open_few_of_the_files_and_are_not_seen_to_read_do_not_count():
    found = read([report(opening=[[list(at(6)), 128], [list(at(10)), 4]])], {at(6): SECOND, at(10): SECOND})
    assert found is not None and found.share == 0.5


def test_the_same_line_number_elsewhere_reads_nothing():
    found = read([report()], {("/home/u/other.py", 6, GETS): SECOND})
    assert found is not None and found.share == 0


def test_what_a_worker_cannot_tell_is_not_zero():
    found = read([report(opened=[2, None, 136, None, None, None]), report()], {at(6): 1_000_000})
    assert found == Reading(opens=68, samples=None, read_bytes=None, made_bytes=None, share=None)


def test_workers_that_have_looked_into_no_batch_say_nothing_of_reading():
    assert read([report(opened=[0, 0, 0, 0, 0, 0]), {}], {at(6): SECOND}) is None


def test_a_worker_of_before_that_counts_no_calls_still_tells_of_its_files():
    found = read([report(opened=[2, 8, 136, 4000, 400])], {at(6): SECOND})
    assert found is not None and (found.opens, found.reads) == (68, None)
