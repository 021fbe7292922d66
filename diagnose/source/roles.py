"""What a statement of the training loop is for: building the batch, computing the loss, or something else.

Hooks see a model call and a backward, not the code between them. The source does: walking back from the
arguments of the model call gives the statements that build the batch, and walking back from what `backward`
is called on gives those that compute the loss. Everything else is other.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping

from diagnose.core.ledger import SLOT_OF
from diagnose.core.phases import Phase
from diagnose.source.asides import called_aside, called_for
from diagnose.source.batch_work import BatchWork
from diagnose.source.calling import calls_in, calls_of, is_call, parameters_of
from diagnose.source.dependencies import Dependencies, Found, own_code
from diagnose.source.effects import Effects
from diagnose.source.epochs import changes_of_data, epochs_in
from diagnose.source.exchanges import Exchanges
from diagnose.source.kinds import Definition, Loop
from diagnose.source.parts import Anchors, Part, of_weights, parts_of
from diagnose.source.reads_writes import writes
from diagnose.source.returned import first_items, items_of
from diagnose.source.scores import Scores, links_of
from diagnose.source.sites import Frame, Line, Sample, Site, Stack, by_place, callers_of, files_of, one_call
from diagnose.source.sources import Sources
from diagnose.source.statements import functions_of, header_lines, innermost_of, statements_of

CALLED_IN = {SLOT_OF["forward"]: {"forward", "further"}, SLOT_OF["optimizer"]: {"optimizer"}}
"""Kinds of the calls in which the time of a slot passes."""

AFTER_FORWARD = SLOT_OF["gap_after_forward"]
AFTER_BACKWARD = SLOT_OF["gap_after_backward"]

DRAWS = {"argmax", "multinomial", "sample", "topk"}
"""What chooses the next word of a text that a model writes."""

OWN_TURNS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
"""Functions that are a part of an expression. Since Python 3.12 only generators are functions."""

PHASE_OF_KIND = {
    "next": Phase.DATA_WAIT,
    "forward": Phase.FORWARD,
    "further": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
}

Reaching = tuple[Stack, set[str], set[str], Mapping[str, set[str]]]
"""What `Roles.results` tells of a stack, and `Results.reach` is asked with."""


class Roles:
    """Answers which phase a sampled stack belongs to when no hook was open.

    Args:
        sites: Lines from which batches were asked, models called, backward passes and steps begun.
        sources: Text of each file, where it can be read; a file without text has no roles.
        samples: What the sampler saw. A stack inside a model call or a backward also shows which lines
            called the function that it is in: a loop may build its batch and leave the rest to a function.
    """

    def __init__(self, sites: Iterable[Site], sources: Sources, samples: Iterable[Sample] = ()) -> None:
        self._roles: dict[Line, Phase] = {}
        self._anchored: set[Line] = set()
        self._kinds: dict[Line, set[str]] = {}
        self._of_weights: set[Line] = set()
        self._aside: dict[Line, dict[str, Phase]] = {}
        self._given: dict[Line, set[str]] = {}
        self._results: dict[Line, tuple[set[str], set[str], Mapping[str, set[str]]]] = {}
        self._acts: set[Line] = set()
        self._work = BatchWork(sources)
        self._own: set[tuple[str, int, str]] = set()
        self._inside: dict[tuple[str, int, str], set[Line]] = {}
        sites, samples = list(sites), list(samples)
        straight = by_place(sites)
        self._calling = {(file, line, function) for _, file, line, function, _ in sites}
        by_file: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for (file, line), kinds in straight.items():
            by_file[file] += ((line, kind) for kind in kinds)
        through: dict[Line, set[str]] = {}
        for file, line, kind, called in callers_of(straight, samples):
            by_file[file].append((line, kind))
            if kind == "forward":
                through.setdefault((file, line), set()).add(called)
        files = (*(files_of(samples) - by_file.keys()), *by_file)
        trees = {file: tree for file in files if (tree := sources.tree(file)) is not None}
        self._effects = Effects(trees)
        self._scopes = {file: list(functions_of(tree)) for file, tree in trees.items()}
        self._lines_returned: dict[Line, set[int]] = {}
        self._generating: dict[Line, bool] = {}
        parts = [
            part
            for file in by_file
            if file in trees
            for part in parts_of(file, trees[file], by_file[file], through, self._effects)
        ]
        self._links = links_of(parts)
        self._scoring: set[str] = set()
        self._exchanges = Exchanges(self._effects)
        self._exchanges.read(samples, sources, by_file)
        epochs = epochs_in(straight, through, self._effects)
        for part in parts:
            self._read(part, straight, through, epochs)
        self._work.read()

    def phase(self, stack: Stack, slot: int) -> Phase:
        """Returns the phase of a stack sampled between hooks, in the gap of a slot.

        The innermost frame of a function that holds a model call or a backward decides: what it calls
        serves the statement that calls it.
        """
        for depth, (file, line, _) in enumerate(stack):
            kinds = self._kinds.get((file, line))
            if kinds is not None:
                if depth and slot == AFTER_FORWARD:
                    called = stack[depth - 1][2].rpartition(".")[2]
                    aside = self._aside.get((file, line), {}).get(called)
                    if aside is not None:
                        return aside
                    if (file, line, called) in self._own:
                        return Phase.OTHER
                return _beside(kinds, slot, within=self._within(stack, depth, kinds))
            if (file, line) in self._anchored:
                called = stack[depth - 1][2].rpartition(".")[2] if depth else ""
                given = called in self._given.get((file, line), ())
                serves = depth == 0 or (
                    (file, line, called) not in self._own
                    and self._serves(file, line, called, stack[depth - 1])
                )
                role = self._roles.get((file, line), Phase.OTHER) if serves else Phase.OTHER
                return Phase.DATA_WAIT if given else role
        return Phase.OTHER

    def _within(self, stack: Stack, depth: int, kinds: set[str]) -> bool:
        """Whether what a statement that calls a model does beside, in a function or a loop within its
        expression, may be the batch: `model(get_batch())`, not a penalty of the weights."""
        turns = stack[depth][2].rpartition(".")[2] in OWN_TURNS
        if turns and stack[depth][:2] in self._of_weights:
            return False
        if not depth:
            return turns and stack[0] not in self._calling
        called = stack[depth - 1][2].rpartition(".")[2]
        return "backward" not in kinds or not self._effects.computes(called)

    def works_on_batch(self, stack: Stack, slot: int) -> bool:
        """Whether a stack in the gap of a slot computes something of a batch that is there: in a statement
        of the loop that is given what another has got in the same turn, and not where it reads files."""
        depth = self._depth(stack)
        if depth is None or not self._work.is_in(stack[: depth + 1]):
            return False
        return self.phase(stack, slot) is Phase.DATA_WAIT

    def _serves(self, file: str, line: int, called: str, inner: Frame) -> bool:
        """Whether a function's line has to do with what its caller's line calls the function for."""
        serving = self._inside.get((file, line, called))
        return serving is None or inner[:2] in serving

    def calls_model(self, frame: Frame) -> bool:
        """Whether a model was called straight from the statement on a frame's line."""
        return not self._kinds.get(frame[:2], set()).isdisjoint(("forward", "further"))

    def within_call(self, stack: Stack, slot: int) -> int:
        """Returns how many of the innermost frames of a stack, sampled in a slot, are of what a hook has
        measured: of a model that was called, or an optimizer's step. What the functions further out are
        called says nothing of that, unless they call the model only to score.
        """
        kinds = CALLED_IN.get(slot, set())
        for depth, frame in enumerate(stack):
            if self._kinds.get(frame[:2], set()) & kinds:
                return len(stack) if frame[2].rpartition(".")[2] in self._scoring else depth
        return len(stack)

    def helper(self, stack: Stack) -> tuple[str, str] | None:
        """Returns file and name of the function in which a stack left the loop; `None` if it did not."""
        depth = self._depth(stack)
        return stack[depth - 1][::2] if depth else None

    def makes_loss(self, stack: Stack) -> bool:
        """Whether the innermost line of a stack makes what the loop's own line, a part of the loss, gets of
        the functions that it calls: not what these compute besides."""
        depth = self._depth(stack)
        if depth is None or self._roles.get(stack[depth][:2]) is not Phase.FORWARD:
            return False
        return all(line in self._returned(file, line) for file, line, _ in stack[:depth])

    def gathers_loss(self, stack: Stack) -> bool:
        """Whether a stack in a collective gets what the loss or a batch is made of, in the loop's own code:
        not what DDP does for the model that a line calls."""
        depth = self._depth(stack)
        if depth is None or stack[depth][:2] in self._kinds or stack[depth][:2] not in self._roles:
            return False
        return all(line in self._returned(file, line) for file, line, _ in stack[:depth])

    def _returned(self, file: str, line: int) -> set[int]:
        """Returns the lines that make what the function around a line returns."""
        scopes = self._scopes.get(file, [])
        function = scopes[innermost_of(scopes, line)] if scopes else None
        if function is None or isinstance(function, ast.Module):
            return set()
        if (file, function.lineno) not in self._lines_returned:
            part = self._unhooked(file, function)
            asked = self._links.asked.get(function.name, ())
            starts = [
                (item.at, set(item.reads))
                for statement in part.statements
                if isinstance(statement, ast.Return)
                for item in first_items(items_of(part, statement), asked)
            ]
            self._lines_returned[file, function.lineno] = part.lines_for(starts)
        return self._lines_returned[file, function.lineno]

    def _unhooked(self, file: str, function: Definition) -> Part:
        return Part(file, function, Anchors(), self._effects)

    def acts(self, stack: Stack) -> bool:
        """Whether a stack steps an environment with what the loop's policy has chosen."""
        depth = self._depth(stack)
        if depth is None or stack[depth][:2] not in self._acts:
            return False
        return not depth or stack[depth - 1][2].rpartition(".")[2] == "step"

    def exchanges(self, stack: Stack) -> str:
        """Returns `ENVIRONMENT` if a stack is in what the loop's policy acts in, `ROLLOUT` if it chooses
        what to do there, or nothing."""
        return self._exchanges.serves(stack)

    def writes_batch(self, stack: Stack) -> bool:
        """Whether in a stack a model is asked without gradients for what the loop will train on, word by
        word: by `generate`, or in a loop that draws what comes next, `torch.multinomial(probs, 1)`. What a
        teacher or an encoder says of a batch is none."""
        depth = self._depth(stack)
        if depth is None or self._roles.get(stack[depth][:2]) is not Phase.DATA_WAIT:
            return False
        return any(self._generates(frame[:2], depth == i) for i, frame in enumerate(stack[: depth + 1]))

    def _generates(self, line: Line, of_loop: bool) -> bool:
        """Whether a line asks a model to `generate`, or, if it is not the training loop's, the function
        around it draws in a loop."""
        if line not in self._generating:
            file, number = line
            scopes = self._scopes.get(file, [])
            function = scopes[innermost_of(scopes, number)] if scopes else None
            found = list(statements_of(function)) if function is not None else []
            drawing = [] if of_loop else [s for s in found if isinstance(s, Loop)]
            here = [call for s in found if number in header_lines(s) for call in calls_of(s)]
            inside = calls_in(*(each for loop in drawing for each in loop.body))
            self._generating[line] = any(is_call(each, {"generate"}) for each in here) or any(
                is_call(each, DRAWS) for each in inside
            )
        return self._generating[line]

    def results(self, stack: Stack) -> Reaching | None:
        """Returns what a model has computed that a stack may have to do with; `None` outside of the loop.

        Returns:
            The stack up to the loop's own frame, the names that hold results there, other than the loss,
            those of which batches are made, and by the names of objects with a loss in them what that is.
        """
        depth = self._depth(stack)
        found = self._results.get(stack[depth][:2]) if depth is not None else None
        return None if depth is None or found is None else (stack[: depth + 1], *found)

    def _only_scores(self, part: Part, found: Found) -> bool:
        """Whether a function calls models for nothing that a loss or a batch is made of."""
        if part.passes or part.feeds or any("." in name for s in part.models for name in writes(s)):
            return False
        asked, fed = self._links.asked.get(part.name), self._links.fed.get(part.name)
        return not found.hands_on if asked is None else not asked and not fed

    def _depth(self, stack: Stack) -> int | None:
        """Returns the place of the innermost frame that is the loop's own."""
        return next((i for i, (file, line, _) in enumerate(stack) if (file, line) in self._anchored), None)

    def _read(
        self,
        part: Part,
        straight: Mapping[Line, set[str]],
        through: Mapping[Line, set[str]],
        epochs: set[str],
    ) -> None:
        """Takes in the statements of a function."""
        file = part.file
        for statement in part.statements:
            lines = part.lines(statement)
            kinds = one_call(set().union(*(straight.get(line, ()) for line in lines)))
            if kinds:
                self._kinds.update(dict.fromkeys(lines, kinds))
                if of_weights(statement):
                    self._of_weights.update(lines)
            leads = set().union(*(through.get(line, ()) for line in lines))
            if leads:
                self._given.update(dict.fromkeys(lines, called_for(statement, leads)))
        anchors = part.anchors
        if not (anchors.forward or anchors.further or anchors.backward or part.feeds):
            return
        found = Dependencies(part, self._links).found()
        between = list(changes_of_data(part, found, epochs))
        found.roles.update((line, Phase.DATA_WAIT) for s in between for line in header_lines(s))
        if self._only_scores(part, found):
            self._scoring.add(part.name)
        scores = Scores(part, found, self._links)
        results, made_of = scores.results(), scores.made_of()
        self._anchored.update(part.lines(*part.statements))
        for statement in part.statements:
            if anchors.forward.intersection(header_lines(statement)):
                aside = called_aside(part, found, statement)
                self._aside.update(dict.fromkeys(part.lines(statement), aside))
        self._roles.update(((file, line), phase) for line, phase in found.roles.items())
        self._results.update(
            ((file, line), (names, made_of, scores.lost)) for line, names in results.items()
        )
        self._work.add(part, found)
        self._acts.update(part.lines(*part.acts))
        for line, own in own_code(part, found).items():
            self._own.update((file, line, name) for name in own)
        for line, called in found.inside.items():
            for name, wanted in called.items():
                self._inside[file, line, name] = {
                    (other, each)
                    for other, function in self._effects.functions[name]
                    for each in self._unhooked(other, function).lines_of(_own(wanted, function))
                }


def _own(wanted: set[str], function: Definition) -> set[str]:
    """Returns by a function's own names what its caller wants it to assign: `self.x`, for `model.x`, or a
    parameter."""
    attributes = {f"self.{name.partition('.')[2]}" for name in wanted if "." in name}
    return attributes.union(parameters_of(function))


def _beside(kinds: set[str], slot: int, *, within: bool) -> Phase:
    """Returns whose the time is that passes in a statement before or after what a hook sees of it.

    Args:
        kinds: What the statement does. One that does it all calls a trainer, whose time this does not tell.
        slot: The gap in which the time passed.
        within: Whether it passed in another function of the user's that the statement calls, or in a loop
            within its expression that calls no model.
    """
    if slot == AFTER_FORWARD and "next" not in kinds and kinds & {"forward", "further", "backward"}:
        return Phase.FORWARD  # loss = cross_entropy(model(x), y)
    if within and (kinds == {"forward"} or (kinds == {"forward", "backward"} and slot != AFTER_BACKWARD)):
        return Phase.DATA_WAIT  # out = model(get_batch())
    if len(kinds) > 1:
        return Phase.OTHER
    return PHASE_OF_KIND[next(iter(kinds))]
