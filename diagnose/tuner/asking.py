"""When the rules are asked about the run in progress, what that may cost, and what they have found."""

from __future__ import annotations

from dataclasses import asdict

from diagnose.core.units import NS_PER_S, NS_PER_US
from diagnose.tuner.agreement import until
from diagnose.tuner.changes import Changes
from diagnose.tuner.diagnosis import Diagnosis
from diagnose.tuner.orders import Orders
from diagnose.tuner.policy import Lead
from diagnose.tuner.world import Course, Plan, World

OBSERVED_STEPS = 25
OBSERVED_NS = 2 * NS_PER_S
"""A diagnosis needs so many steps beyond the warm-up, and so much time: the records reach the disk twice a
second, and the operating system is read as often."""

LOOK_NS = 80 * NS_PER_US
"""What a step takes longer that is looked at, as each of a trial is, than one in which tuning rests: the
hooks see all of it, and what they saw is handed on. On two cores of a shared x86_64 it was 80 to 87 us in
the median, with steps of 0.35, 0.55 and 1.2 ms. A run's own steps would tell it no better: with those of
1.2 ms a half of all blocks of 56 came out below 27 us or above 165."""

LEAST_LEFT_NS = 10 * NS_PER_S
"""A run that is known to be over sooner is left alone: a diagnosis, a trial and its confirmation take half
of that."""

LOOK_AGAIN_STEPS = (200, 800, 3200)
"""Where the findings led to no trial the rules are asked again after so many more steps, once that is
affordable: some faults, such as full garbage collections, come rarely."""

LOOK_LATER = 4
"""While something is kept the rules are asked again, each time after so many times as many steps."""

DIAGNOSES_SHARE = 0.02
"""All diagnoses after the first may take this part of the time since tuning began. They have a process of
their own, but where training uses all CPUs it waits for them."""

PAYS_TIMES = 2
"""Or a diagnosis may be made where what was just kept is going to win so many times what one takes."""


class Asking:
    """The diagnoses of one process's tuning.

    Args:
        changes: What is in force.
        orders: What the user allows.
        course: Where tuning stands.

    Attributes:
        leads: What was found last; `None` where the rules are to be asked.
        step_ns: What a step took when that was observed last.
        looked_at_ns: What it would have taken with each one looked at.
    """

    def __init__(self, world: World, changes: Changes, orders: Orders, course: Course) -> None:
        self.leads: list[Lead] | None = None
        self.step_ns = self.looked_at_ns = 0.0
        self._world = world
        self._changes = changes
        self._orders = orders
        self._course = course
        self._first = 0
        self._look_at = sum(LOOK_AGAIN_STEPS)
        self._diagnosis: Diagnosis | None = None
        self._cost_ns = self._more_ns = 0.0

    def observe(self, warmup: int) -> Plan[None]:
        """Lets the script run; notes the first step that counts, and how long they take."""
        self._course.enter("observing")
        for _ in range(max(warmup, 1)):
            yield 1
        self._first, begun, looks = self._course.step.number, self._world.clock(), self._course.looks
        yield from self._orders.let_pass(OBSERVED_STEPS)
        yield from until(self._world, "the observation", lambda: self._world.clock() - begun >= OBSERVED_NS)
        steps = self._course.step.number - self._first
        self.step_ns = (self._world.clock() - begun) / steps
        self.looked_at_ns = self.step_ns + LOOK_NS * (1 - (self._course.looks - looks) / steps)

    def is_nearly_over(self) -> bool:
        """Whether too little is left of the run for tuning to pay; what the user names is tried even so."""
        policy, left = self._orders.policy, self._world.job.steps_left()
        short = left is not None and left * self.step_ns < LEAST_LEFT_NS
        if policy.only or policy.dry_run:
            return False
        return all(self._world.ranks.exchange("what is left of the run", short))

    def diagnose(self) -> Plan[None]:
        """Asks the rules, on rank 0 alone: its folder holds what all ranks of the machine have recorded."""
        self.close()  # of one that a loss has cut short
        found: list[Lead] | None = []
        if self._world.ranks.rank == 0:
            self._diagnosis, found = self._world.diagnose(self._first), None

        def known() -> bool:
            nonlocal found
            if found is None and self._diagnosis is not None:
                found = self._diagnosis.leads()
            return found is not None

        in_force = [installed.name for installed in self._changes.kept]
        yield from until(self._world, "the diagnosis", known)
        if self._diagnosis is not None:
            if self._cost_ns:
                self._more_ns += self._diagnosis.cost_ns  # the first is not counted
            self._cost_ns = self._diagnosis.cost_ns
        self._diagnosis = None
        told = self._world.ranks.exchange("the findings", [asdict(lead) for lead in found or ()])
        rules = [lead["rule"] for lead in told[0]]
        step = self._course.step.number
        self._world.tell("diagnosed", {"step": step, "rules": rules, "in_force": in_force})
        self.leads = [Lead.from_record(record, in_force) for record in told[0]]

    def pays(self) -> bool:
        """Whether what was kept last wins enough for the rules to be asked again, or they may be anyway."""
        measured, left = self._changes.kept[-1].measured, self._world.job.steps_left()
        assert measured is not None
        steps = self._course.step.number if left is None else left
        pays = (measured.without_ns - measured.with_ns) * steps >= PAYS_TIMES * self._cost_ns
        return bool(self._world.ranks.exchange("whether the rules are asked", pays or self._may())[0])

    def again(self, steps: int | None) -> Plan[bool]:
        """Asks the rules again, after so many steps and when that is affordable.

        Returns:
            Whether it has: not where the run is over before, or something new may be tried now.
        """
        left = self._world.job.steps_left()
        too_late = left is not None and (
            left <= (steps or 0) or self._world.clock() + left * self.step_ns <= self._next_ns()
        )
        if steps is None or self._world.ranks.exchange("when the rules are asked", too_late)[0]:
            return False
        self._course.enter("waiting")
        yield from self._orders.let_pass(steps, until_reopened=True)
        while not self._orders.reopened:
            commands = lambda: bool(self._world.commands)  # noqa: E731
            if (yield from until(self._world, "the next diagnosis", self._may, commands)):
                yield from self.diagnose()
                return True
            yield from self._orders.obey()
        return False

    def is_due(self) -> bool:
        """Whether so many steps have passed that the findings may be others, and a diagnosis is affordable;
        then what was found is forgotten."""
        due = self._orders.tries and self._course.step.number >= self._look_at
        if not due or not self._world.ranks.exchange("whether the rules are asked", self._may())[0]:
            return False
        self._look_at *= LOOK_LATER
        self.leads = None
        return True

    def _may(self) -> bool:
        return self._world.clock() >= self._next_ns()

    def _next_ns(self) -> float:
        """When another diagnosis is affordable, on the clock by which tuning began."""
        return self._course.spending.begun_ns + (self._more_ns + self._cost_ns) / DIAGNOSES_SHARE

    def close(self) -> None:
        """Gives up a diagnosis that is under way."""
        if self._diagnosis is not None:
            self._diagnosis.close()
            self._diagnosis = None
