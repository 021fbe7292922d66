"""What the device clock needs of an accelerator, and nothing else of it: a seam for tests without one."""

from __future__ import annotations

from typing import Any, Protocol

Event = Any
"""A place in a stream of the device, which the device passes at some time of its own clock."""

Stream = Any
"""A queue of the device, which it works through in order. Two of them compare equal if they are the
same."""


class Device(Protocol):
    """One device, as the training thread and the flusher's thread see it.

    Nothing here waits for the device: there is no way to ask for that.
    """

    def current_stream(self) -> Stream:
        """Returns the stream that the calling thread launches into."""

    def new_event(self) -> Event:
        """Returns an event that is nowhere yet."""

    def record(self, event: Event, stream: Stream) -> None:
        """Puts an event behind all that is in a stream now, wherever it was before."""

    def is_capturing(self) -> bool:
        """Whether what the calling thread launches goes into a graph, not to the device."""

    def has_passed(self, event: Event) -> bool:
        """Whether the device has come to an event that was recorded."""

    def ms_between(self, earlier: Event, later: Event) -> float:
        """Returns the device's own milliseconds between two events that it has passed."""

    def begin_reading(self) -> None:
        """Called once by the thread that asks of events, before it does: so that its asking disturbs no
        other thread.

        Raises:
            OSError: If it would.
        """
