"""What can be asked of a running job from outside."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diagnose.core.trial import Safety

SAFETIES = tuple(safety.value for safety in Safety)
COMMANDS = ("pause-tuning", "resume-tuning", "allow", "forbid", "undo", "deep-window")
ACTION = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        command: One of `COMMANDS`.
        argument: A class of safety for `allow` and `forbid`, the name of an action for `undo`; else empty.

    Raises:
        ValueError: If there is no such command, or the argument is none of its.
    """

    command: str
    argument: str = ""

    def __post_init__(self) -> None:
        if self.command not in COMMANDS:
            raise ValueError(f"there is no command {str(self.command)[:40]!r}")
        if not isinstance(self.argument, str):
            raise ValueError(f"{self.command}: the argument is no text")
        if self.command in ("allow", "forbid"):
            if self.argument not in SAFETIES:
                raise ValueError(f"{self.command}: {self.argument[:40]!r} is none of {', '.join(SAFETIES)}")
        elif self.command == "undo":
            if not ACTION.fullmatch(self.argument):
                raise ValueError(f"undo: {self.argument[:40]!r} cannot name an action")
        elif self.argument:
            raise ValueError(f"{self.command} takes no argument")
