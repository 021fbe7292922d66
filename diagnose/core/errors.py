"""What a user can act on."""

from __future__ import annotations


class DiagnoseError(Exception):
    """A condition the user can mend.

    The command line prints the message alone, without a traceback, and exits 2. The message says
    what happened, with the name and the numbers, then what to do.
    """
