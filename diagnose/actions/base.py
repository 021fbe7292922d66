"""What an action is: a fix with its way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from diagnose.core.job import Job
from diagnose.core.trial import Safety


class CannotApply(Exception):
    """A precondition does not hold; the message says which, in words for the user."""


class NotYet(CannotApply):
    """A precondition does not hold yet, and may later: the tuner looks again."""


class Action:
    """One fix that can be applied to a running job between two steps, and undone between two others.

    The docstring is the action's documentation page: what it does, when it takes effect, what it cannot
    help, and what was measured.

    The tuner calls, always on the training thread and between two steps: `check`; then, with `values`,
    `prepare` once for a trial, and inside it `apply` as often as it likes. What is kept stays inside both
    contexts to the end of training. Whatever any of them raises, the tuner undoes the action and training
    goes on; `CannotApply` is the one they raise on purpose.

    Attributes:
        safety: What it does to the numbers that training computes.
        order: What the action changes: 10 process, 20 input, 30 layout and optimizer, 40 precision,
            50 ranks, 60 memory, 70 compilation. From 60 on an action waits for those of smaller order;
            below, what is expected to win more is tried first.
        excludes: Names of actions that must not be in force at the same time.
        settle_steps: Steps after a change that show neither state: a queue drains, a cache warms. `prepare`
            may raise it to what its setting needs.
        learning_steps: Steps that what is prepared looks at before it can be put in force.
        window_steps: The fewest steps that show what it does: more where they come in bursts.
        period_steps: Steps after which what it does begins anew: windows hold whole periods.
        steady: Whether, once it has settled, it changes each step alike, but perhaps the one that begins an
            epoch: then a trial need not span whole epochs. So does all that touches `model` or `optimizer`.
        resizes: Whether a step has another number of samples while it is in force: then it is the time per
            sample that counts.
        touches: What its numerics check looks at: `model` compares gradients, `optimizer` compares an
            update, `nothing` has none, because it is `EXACT` by construction or the user has asked for it,
            and `ranks` has none, because one process computes the same and only sends something else.
        spares_collections: Whether it is there to spare full garbage collections: few windows hold one, so
            steps that have one are left out of them, and what they take on average is added.
        unasked: Whether it is tried, last of all, though no finding asks for it: no rule can tell, and a
            trial is cheap.
        at_start: Whether it must be in force before the first step, so that no trial can tell what it wins:
            `--apply` puts it there.
        frees_memory: Whether it is there to free memory, not to make steps faster: where the user names it,
            it stays unless steps take far longer.
        hangs_on: Which objects of the job it is hung on: `models`, `optimizers`, or both; or `blocks`,
            which are inside of models and stay where a script wraps the same ones anew. They are held
            weakly (see `_gone`), and where all of a kind are gone nothing is left of it. Empty where it is
            of the whole process, of loaders, or of other ranks, too.
    """

    safety: ClassVar[Safety]
    order: ClassVar[int] = 30
    excludes: ClassVar[frozenset[str]] = frozenset()
    settle_steps: int = 1
    learning_steps: ClassVar[int] = 0
    window_steps: int = 5
    period_steps: int = 1
    steady: ClassVar[bool] = False
    resizes: ClassVar[bool] = False
    touches: ClassVar[str] = "nothing"
    spares_collections: ClassVar[bool] = False
    unasked: ClassVar[bool] = False
    at_start: ClassVar[bool] = False
    frees_memory: ClassVar[bool] = False
    hangs_on: ClassVar[tuple[str, ...]] = ()

    def check(self, job: Job) -> None:
        """Looks whether the action can be applied at all. Changes nothing.

        Raises:
            CannotApply: If it cannot.
        """

    def check_unasked(self, job: Job) -> None:
        """Looks whether a trial is worth it though no finding asks for it.

        Raises:
            CannotApply: If it is not.
        """

    def values(self, job: Job) -> Sequence[int | None]:
        """Returns the settings to choose from; the best of several is found by successive halving."""
        return (None,)

    def start_up_s(self, job: Job) -> float:
        """Returns about how many seconds it takes once before it helps; 0 where that is hardly any. It is
        not tried where what is left of the run would win less."""
        return 0.0

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        """Does what is dear and does not change the job yet: starts workers, compiles.

        Yields:
            What `apply` gets.
        """
        yield value

    def apply(self, job: Job, prepared: Any) -> AbstractContextManager[None]:
        """Changes the job; leaving changes it back to the very objects and values that were there.

        Raises:
            CannotApply: If it cannot after all; then nothing was changed.
        """
        raise NotImplementedError

    def why_not_stay(self, prepared: Any) -> str:
        """Returns why it must not stay in force, as has turned out while it was; empty where it may. Asked
        in its trial and now and again while it is kept."""
        return ""

    def alike(self, prepared: Any) -> str:
        """Returns in words what has to be the same on every rank, or all refuse it."""
        return ""

    def largest(self, job: Job) -> int | None:
        """Returns the largest value that makes sense here; `None` where any does. Asked of a value that was
        kept on another machine, perhaps."""
        return None

    def state(self, job: Job) -> Any:
        """Returns everything that `apply` changes, comparably: flags, identities of objects."""
        raise NotImplementedError

    def verify_undone(self, job: Job, before: Any) -> None:
        """Checks that the job is as it was.

        Args:
            before: What `state` returned before `apply`.

        Raises:
            RuntimeError: If something is different; says what.
        """
        after = self.state(job)
        if after != before:
            raise RuntimeError(f"{type(self).__name__} was not undone: {before!r} became {after!r}")

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        """Returns what makes the action permanent in a script, such as `{"DataLoader.num_workers": "2"}`.

        A key is `Callable.argument` of a call in the script, `statement` for a line to add once before the
        loop, `advice` for one with names of the script, which its author has to put into place, or `note`
        for a sentence on what that does beside, or why it is no setting; every other value is source code.
        Asked for while the action is not in force.
        """
        return {}
