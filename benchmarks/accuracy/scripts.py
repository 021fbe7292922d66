"""The training scripts, and the faults that each can have.

A script is an ordinary program whose mistakes are options, off by default. The file beside it says which:

    pairs = [["slow-collate", "logging-io"]]    to be had at once

    [[fault]]
    label = "slow-collate"       the rule that should name it
    option = "--boxes"           what switches it on, followed by a size if it takes one
    probe = 40                   a size that costs about as much as the rest of the step; 0 is off
    range = [10, 400]            or: sizes that cost little and much, where it is not linear from nothing
    dial = "--rows"              the option that `probe` and `range` are of, given to both arms, where the
                                 fault itself has no size: more rows, and it is a smaller part of the step
    with = "--workers 1"         given to both arms
    grows = true                 its size goes with the number of steps
    beside = true                something works beside the loop, also while that waits; or, of the whole
                                 script, above all faults
    also = ["serial-loading"]    other names that are as right, and
    because = "..."              why
    name = "boxes"               what tells faults of one label apart

    [[decoy]]                    a fault that costs nothing while a bigger one stands before it
    fault = "slow-collate"
    behind = "logging-io"

A fault with neither is as large as it is, whatever severity is asked for. One whose name begins with
`hidden` is a decoy only: its size is its probe.

A script without such a file, or with all options off, is healthy: whatever is said of it is a false alarm.
It is healthy as far as its author knows: a `[[mend]]` there, see `alarms.py`, tells whether what was said
of it is true.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
SETS = {"tuning": HERE / "tuning", "held-out": HERE / "held_out"}
"""Thresholds may be chosen by looking at the first; the second is for judging only."""

PROBE = 50
"""The severity at which a fault's size is its probe, about half of the step, and needs no calibration."""

AS_IT_IS = 0
"""The severity of a fault that has no size: whatever it truly costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake that a script can make.

    Attributes:
        label: The rule that should name it.
        option: The command-line option that switches it on.
        probe: A size that makes it about half of the step; `None` where it has no size.
        range: Sizes that make it a small and a large part.
        dial: The option that these are of, given to both arms; empty if they are of `option`.
        fixed: Options that both arms of a comparison get.
        also: Names that are as right as the label.
        because: Why they are.
        name: What tells faults of one script apart that share a label: `busy`, `sleep`.
        ranks: Processes that the job takes.
        beside: Whether workers, threads or other programs work on while the training loop waits.
        grows: Whether it is another fault in a run of more steps.
    """

    label: str
    option: str
    probe: float | None = None
    range: tuple[float, float] | None = None
    dial: str = ""
    fixed: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    because: str = ""
    name: str = ""
    ranks: int = 1
    beside: bool = False
    grows: bool = False

    def __post_init__(self) -> None:
        if self.probe is None and (self.dial or self.range):
            raise ValueError(f"{self.label}: a fault with a dial or a range has a probe, too")
        if bool(self.also) != bool(self.because):
            raise ValueError(f"{self.label}: another right name needs a reason, and only that")

    @property
    def is_hidden(self) -> bool:
        """Whether it is a decoy only, which costs nothing."""
        return self.name.startswith("hidden")

    @property
    def limits(self) -> tuple[float, float]:
        """The sizes between which one is looked for."""
        assert self.probe is not None
        return self.range or (self.probe / 200, self.probe * 16)

    def arms(self, size: float | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the options of a job without the fault, and with it at this size."""
        if size is None:
            return self.fixed, (*self.fixed, *self.option.split())
        text = str(max(1, round(size))) if isinstance(self.probe, int) else f"{size:.6g}"
        if self.dial:
            fixed = (*self.fixed, self.dial, text)
            return fixed, (*fixed, *self.option.split())
        return self.fixed, (*self.fixed, self.option, text)

    @property
    def right(self) -> tuple[str, ...]:
        """All names that are right."""
        return (self.label, *self.also)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """A change of a script that wins something if what was said of it is true.

    Attributes:
        rule: What was said.
        old: The text that is replaced, once in the script.
        new: What takes its place.
    """

    rule: str
    old: str
    new: str

    def of(self, text: str) -> str:
        """Returns the script's text, mended."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.rule}: {self.old!r} is there {text.count(self.old)} times")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script.

    Attributes:
        set: `tuning` or `held-out`.
        path: The file.
    """

    set: str
    path: Path

    def __str__(self) -> str:
        return f"{self.set}/{self.path.stem}"

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the file beside it says; empty without one."""
        beside = self.path.with_suffix(".toml")
        return tomllib.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}

    @property
    def ranks(self) -> int:
        """Processes that the job takes."""
        return int(self.facts.get("ranks", 1))

    @cached_property
    def steps(self) -> int:
        """Steps that it takes when it is not told how many; 0 where it cannot be told."""
        found = re.search(r'"--steps", type=int, default=(\d+)', self.path.read_text(encoding="utf-8"))
        return int(found[1]) if found else 0

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """The mistakes that it can make."""
        beside = self.facts.get("beside", False) or self.ranks > 1
        return tuple(_fault(entry, self.ranks, beside) for entry in self.facts.get("fault", ()))

    @property
    def mends(self) -> tuple[Mend, ...]:
        """What would mend what was said of it without a fault."""
        return tuple(Mend(**entry) for entry in self.facts.get("mend", ()))

    @property
    def decoys(self) -> tuple[tuple[Fault, Fault], ...]:
        """Pairs of a fault that costs nothing and the one that hides it."""
        named = {fault.name or fault.label: fault for fault in self.faults}
        return tuple(
            (named[entry["fault"]], named[entry["behind"]]) for entry in self.facts.get("decoy", ())
        )

    @property
    def pairs(self) -> tuple[tuple[Fault, Fault], ...]:
        """Faults to have at once."""
        named = {fault.name or fault.label: fault for fault in self.faults}
        return tuple((named[first], named[second]) for first, second in self.facts.get("pairs", ()))


def _fault(entry: dict[str, Any], ranks: int, beside: bool) -> Fault:
    limits = entry.get("range")
    return Fault(
        label=entry["label"],
        option=entry["option"],
        probe=entry.get("probe"),
        range=(limits[0], limits[1]) if limits else None,
        dial=entry.get("dial", ""),
        fixed=tuple(entry.get("with", "").split()),
        also=tuple(entry.get("also", ())),
        because=entry.get("because", ""),
        name=entry.get("name", ""),
        ranks=ranks,
        beside=beside or entry.get("beside", False),
        grows=entry.get("grows", False),
    )


def scripts(which: str | None = None) -> list[Script]:
    """Returns the scripts of one set, or of both."""
    return [
        Script(set=name, path=path)
        for name, folder in SETS.items()
        if which in (None, name)
        for path in sorted(folder.glob("*.py"))
    ]
