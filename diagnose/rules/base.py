"""What a rule is."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import ClassVar

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile


class Rule(ABC):
    """Names one fault, proves it, and says what it costs. The docstring is its page of documentation.

    A rule reads a profile and changes nothing. What was not measured is `None`, never zero: a rule that
    cannot do without such a reading lists it in `needs`, and abstains where it is missing.

    Attributes:
        needs: Readings without which nothing can be said, as paths from the profile:
            `host.runnable_share`.
        actions: Names of the actions that help, the best first.
        explains: Names of rules that see the same time less exactly: where both fire, this one is the
            cause, and they get only what it leaves.
        spoils: Names of rules that are not heard while this fault is there, because it changes what they
            measure by an amount that nobody knows.
        residual: Whether it explains only what no other rule does: a fault of the surroundings that slows
            down whatever the step does.
        is_limit: Whether nothing in the script is wrong where it fires: what would be won takes another
            design, or a trial. A fault of the script comes first unless it costs less than half of that.
        of_host: Whether it says what the host lost: an accelerator that had work queued meanwhile may have
            lost nothing of it.
        fires_on: Profiles in which the fault is there.
        silent_on: Profiles in which it is not, healthy ones and neighbours.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    actions: ClassVar[tuple[str, ...]] = ()
    explains: ClassVar[tuple[str, ...]] = ()
    spoils: ClassVar[tuple[str, ...]] = ()
    residual: ClassVar[bool] = False
    is_limit: ClassVar[bool] = False
    of_host: ClassVar[bool] = False
    fires_on: ClassVar[tuple[Profile, ...]]
    silent_on: ClassVar[tuple[Profile, ...]]

    @property
    def name(self) -> str:
        """The file's name with dashes."""
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    @property
    def title(self) -> str:
        """The fault in one sentence: the first line of the rule's file, without its full stop."""
        module = inspect.getmodule(type(self))
        return (inspect.getdoc(module) or self.name).splitlines()[0].rstrip(".")

    @property
    def page(self) -> str:
        """The documentation, in markdown."""
        return inspect.getdoc(type(self)) or ""

    def applies(self, profile: Profile) -> bool:
        """Whether the fault could be there at all: no loader, no slow loader. Asked before `needs`."""
        return True

    def needed(self, profile: Profile) -> tuple[str, ...]:
        """Returns those of `needs` that it cannot do without in a run of this kind."""
        return self.needs

    def explained(self, finding: Finding, profile: Profile) -> tuple[str, ...]:
        """Returns which of `explains` see the time of a finding less exactly; `check` has just found it."""
        return self.explains

    @abstractmethod
    def check(self, profile: Profile) -> Finding | None:
        """Returns the fault if it is there. Called where `applies`, with all of `needs` measured."""
