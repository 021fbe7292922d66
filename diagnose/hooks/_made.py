"""Where the script makes its objects."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._frames import resolve, user_frame
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import around, replaced

UNKNOWN = ("", 0)

Places = weakref.WeakKeyDictionary[Any, tuple[str, int]]


def nothing() -> None:
    """Does nothing."""


@contextmanager
def remembered(kind: type, recorder: Recorder, made: Callable[[], None] = nothing) -> Iterator[Places]:
    """Keeps, inside, the file and the line of the script from which each object of a class is made.

    Args:
        kind: The class.
        recorder: Notes what goes wrong.
        made: Called when one is made.
    """
    places: Places = weakref.WeakKeyDictionary()

    def note(made_object: Any) -> None:
        frame = user_frame(sys._getframe(1))
        if frame is not None:
            places[made_object] = resolve(*frame)[:2]

    def after(args: tuple[Any, ...], result: None) -> None:
        made()
        recorder.guarded(note, args[0])

    with replaced(kind, "__init__", lambda original: around(original, after=after)):
        yield places
