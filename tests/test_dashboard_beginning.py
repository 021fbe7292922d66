"""The first moments of a rank's file, in which it has no tables yet: nothing is wrong, nothing is said."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from diagnose.dashboards._tailing import RankTail

from diagnose.core.liveness import State
from diagnose.store.format import SCHEMA
from diagnose.store.tail import look
from diagnose.store.writer import Writer
from tests.following import followed, until
from tests.recorded import manifest, steps, writer


def moments(path: Path) -> Iterator[str]:
    """Makes a rank's file as the writer does, and stops wherever a reader may come by."""
    path.touch()
    yield "the name is taken"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=wal")
        yield "there is a write-ahead log"
        for statement in SCHEMA.strip().split(";\n"):
            db.execute(statement.removesuffix(";"))
            yield statement.split("(")[0]


def test_a_file_whose_tables_are_being_made_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rank0.sqlite"
    tail = RankTail(path, ("trial",), first=True)
    passed = 0
    for moment in moments(path):
        assert not tail.poll(), moment
        assert (tail.words, tail.num_steps, tail.has_begun) == ("", 0, False), moment
        passed += 1
    assert passed > 10, "every table is a moment of its own"
    path.unlink()
    with closing(writer(tmp_path)) as file:
        file.add_steps(steps(0, 50))
        file.commit()
        assert tail.poll()
    assert (tail.words, tail.num_steps, tail.has_begun) == ("", 50, True)


def test_the_writer_sets_the_version_when_all_tables_are_there(tmp_path: Path) -> None:
    with closing(Writer(tmp_path, 0)), look(tmp_path / "rank0.sqlite") as file:
        assert file.has_begun
        assert (file.meta(), file.chunks_from(0), file.meetings_from(0), file.damaged) == ({}, [], [], [])


def test_a_table_that_is_missing_later_is_damage(tmp_path: Path) -> None:
    with closing(writer(tmp_path)) as file:
        file.add_steps(steps(0, 50))
    with closing(sqlite3.connect(tmp_path / "rank0.sqlite")) as db:
        db.execute("DROP TABLE chunks")
    tail = RankTail(tmp_path / "rank0.sqlite", (), first=True)
    assert tail.poll()
    assert "chunks is damaged" in tail.words


def test_steps_in_a_file_without_a_version_are_shown(tmp_path: Path) -> None:
    with closing(writer(tmp_path)) as file:
        file.add_steps(steps(0, 50))
    with closing(sqlite3.connect(tmp_path / "rank0.sqlite")) as db:
        db.execute("PRAGMA user_version = 0")
    tail = RankTail(tmp_path / "rank0.sqlite", (), first=True)
    tail.poll()
    assert (tail.num_steps, tail.words) == (50, "")


@pytest.mark.parametrize("running", [True, False])
def test_an_empty_file_is_a_fault_only_when_the_run_is_over(tmp_path: Path, running: bool) -> None:
    facts = {"host": os.uname().nodename, "pid": os.getpid(), "started_unix": time.time()}
    folder = manifest(tmp_path / "run", **facts, **({"ended_unix": None} if running else {}))
    (folder / "rank0.sqlite").touch()
    with followed(folder) as live:
        state = State.RUNNING if running else State.ENDED
        snapshot = until(live, lambda now: now.version > 0 and now.liveness.state is state)
    words = (
        "" if running else "rank0.sqlite holds nothing: its process ended before it had written anything"
    )
    assert [rank.words for rank in snapshot.ranks] == [words]
    assert snapshot.notes == (() if running else (f"{words}.",))
