"""What a source line is there for, told from its statement, its functions' names and its packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from itertools import pairwise

from diagnose.core.phases import Phase
from diagnose.source.call_idioms import Within
from diagnose.source.calling import is_call
from diagnose.source.files import into_memory
from diagnose.source.flows import makes_only
from diagnose.source.function_names import NAMED, NAMED_BESIDE, OUTERMOST_WORDS, FunctionNames
from diagnose.source.kinds import Assignment, Function
from diagnose.source.names import last_name, words, words_of
from diagnose.source.place import innermost
from diagnose.source.places import Places
from diagnose.source.purposes import (
    ATTENTION,
    CHAIN,
    CLIP,
    EMA,
    ENVIRONMENT,
    HOOK,
    LOG,
    METRIC,
    PYTHON_LOOP,
    ROLLOUT,
    ROWS,
    SCHEDULE,
    SLICES,
    SYNC,
    UPDATE,
    WAIT,
    WHOLE,
)
from diagnose.source.reads_writes import writes
from diagnose.source.rollouts import (
    ENVIRONMENT_PACKAGES,
    LEARNER_PACKAGES,
    TRAINING_WORDS,
    Acting,
    acting_of,
    measures,
    plays,
)
from diagnose.source.sites import Frame, Stack
from diagnose.source.slices import takes_slices
from diagnose.source.statement_idioms import of_places
from diagnose.source.statements import nodes_of
from diagnose.source.tensor_operations import is_at_once, operations_by_statement
from diagnose.source.texts import formats

LOSS_WORDS = {"loss", "losses", "criterion", "objective"}
BARS = re.compile(r"^(tqdm|rich)/(?!.* (\S+\.)?(__iter__|__init__|track)$)")
"""Packages that draw progress bars, except for functions in which the loop itself runs."""
LOGGING_PACKAGES = re.compile(
    r"^(matplotlib|seaborn|plotly|visdom|tensorboard|tensorboardX|torch/utils/tensorboard"
    r"|wandb|mlflow|comet_ml|neptune)/(?!utils/autologging_utils/|monkey_patching)"
    r"|^PIL/\S+ (\S+\.)?(save|_save|_save_all|_encode_tile|putchunk)$"
)
"""Packages that draw and log, but where they have wrapped themselves around what trains; and what writes a
picture."""

MODEL = (Phase.FORWARD, Phase.BACKWARD)
"""What a model and its parts are called says what they compute, not what the loop does: CLIP, LogSTFT."""

FITTERS = re.compile(r"^(sklearn|scipy|numpy|pandas|statsmodels)/")
"""Packages whose `fit` trains no network: of trees, neighbours, curves."""

ACTING = (Phase.EVALUATION, Phase.DATA_WAIT)
"""Phases that acting in an environment is taken for: without gradients, or for the model's next input."""

BESIDE_THE_MODEL = (Phase.OPTIMIZER, Phase.OTHER)

NAMELESS = (*MODEL, Phase.DATA_WAIT)
"""Phases in which names are of what is computed: `log_mel`, `clip_frames`."""

OF_A_CALL = {PYTHON_LOOP, SLICES, ROWS, CHAIN, ATTENTION}
"""What may be said of a line whose time is that of a module which it calls: `print(model(x))`."""

LOOPS = {PYTHON_LOOP, SLICES, ROWS, CHAIN}
"""Ways in which a line works, whatever for."""

OF_TURNS = {CLIP, EMA, UPDATE}
"""What a function does to the weight that loops give it."""

METRIC_PACKAGES = re.compile(r"^(torchmetrics|torcheval|sklearn/metrics|evaluate|ignite/metrics)\b")


class Idioms:
    """Answers what a sampled line does.

    Args:
        places: The statements of the script; a file without text has no idioms.
        schedules: Files and lines from which learning-rate schedules of torch's are stepped.
    """

    def __init__(self, places: Places, schedules: Collection[tuple[str, int]] = ()) -> None:
        self._places = places
        self._scheduled = frozenset(schedules)
        self._known: dict[tuple[str, int, Within], tuple[str, ...]] = {}
        self._known_acting: dict[tuple[str, int], Acting] = {}
        self._names = FunctionNames(places, self.of_line)
        self._operations: dict[Function | None, dict[int, int]] = {}

    def of(
        self,
        stack: Stack,
        via: str = "",
        phase: Phase = Phase.OTHER,
        *,
        waits: bool = True,
        called: bool = False,
        own: int | None = None,
    ) -> tuple[str, ...]:
        """Returns the idioms of a stack: those of its innermost line, then what the functions are called.

        Args:
            via: The frame of an installed package inside it, as `SourceLine.via` has it.
            phase: What the time is part of. A model's own names and lines are no logging or clipping.
            waits: Whether reading a tensor's value waits for a device. Else it costs next to nothing, and
                counts only where a statement does nothing else.
            called: Whether the time is that of a module which the line calls, not of what else it does.
            own: How many of the innermost frames are of the model or optimizer that took the time. What
                functions further out are called says nothing of it.
        """
        if not stack:
            return ()
        acting = self._acts(stack, via, phase)
        if acting == ENVIRONMENT:
            return (ENVIRONMENT,)
        inside = {function.rpartition(".")[2] for _, _, function in stack}
        stepping = phase is Phase.OPTIMIZER and "step" in inside
        within = Within(phase in MODEL, phase is Phase.FORWARD, "forward" in inside, waits, stepping)
        found = [] if is_training(via) else list(self.of_line(*stack[0][:2], within))
        if self._is_given_by_another_file(stack):
            found = [idiom for idiom in found if idiom not in OF_TURNS]
        if called:
            found = [idiom for idiom in found if idiom in OF_A_CALL]
        is_metrics = METRIC_PACKAGES.match(via) and not (within.loss and self._makes_loss(*stack[0][:2]))
        if is_metrics and METRIC not in found:
            found.insert(0, METRIC)
        if LOG not in found and self._draws(stack[0], via):
            found.insert(0, LOG)
        named = self._names.purpose(stack[:own], NAMED_BESIDE if phase in BESIDE_THE_MODEL else NAMED)
        if named in (METRIC, LOG) and self._raises(*stack[0][:2]):
            named = ""
        if named == METRIC and within.model and any(words(name) & LOSS_WORDS for _, _, name in stack):
            named = ""  # what a loss is made of
        if WAIT in found:
            named = ""  # the wait is the fault, whatever it is done for
        if named and (phase not in NAMELESS or (phase is Phase.FORWARD and named == METRIC)):
            # Reading a value or looping is how a thing is done; the name says what it is done for.
            found = [*dict.fromkeys([named, *(idiom for idiom in found if idiom != PYTHON_LOOP)])]
        if phase is Phase.FORWARD and not called and self._takes_slices(stack, found):
            found = [PYTHON_LOOP, SLICES]
        if within.stepping and not found and self._is_turn(stack, within):
            found = [PYTHON_LOOP]
        if phase in BESIDE_THE_MODEL and set(found) <= {PYTHON_LOOP}:
            found = self._of_averaged_model(stack) or found
        how = LOOPS if waits else LOOPS | {SYNC}
        if phase in BESIDE_THE_MODEL and set(found) <= how and self._schedules(stack):
            found = [SCHEDULE]
        if phase is Phase.OTHER and set(found) <= {PYTHON_LOOP} and self._formats(stack):
            found = [LOG]
        if (phase is Phase.OPTIMIZER and self._is_hook(stack)) or (phase in MODEL and self._notes(stack)):
            found.append(HOOK)
        return (*found, acting) if acting else tuple(found)

    def every(self, stack: Stack) -> str:
        """Returns the innermost condition with a remainder that a stack stands under, `step % 10 == 0`, on
        one line; empty where there is none."""
        for file, line, _ in stack:
            for place in self._places.at(file, line):
                if place.every is not None:
                    return ast.unparse(place.every)
        return ""

    def _draws(self, frame: Frame, via: str) -> bool:
        """Whether a package draws or logs; not one that compresses a picture into memory."""
        if not BARS.match(via) and not LOGGING_PACKAGES.match(via):
            return False
        return not (via.startswith("PIL/") and any(map(into_memory, self._places.at(*frame[:2]))))

    def _takes_slices(self, stack: Stack, found: Collection[str]) -> bool:
        """Whether the innermost function, no module's but called by one's, is called for one slice of a
        tensor after the other, and nothing else was found of its line."""
        if not set(found) <= {PYTHON_LOOP}:
            return False
        outside = [function.rpartition(".")[2] for _, _, function in stack]
        for depth, (file, line, _) in enumerate(stack):
            place = innermost(self._places.at(file, line)) if depth else None
            if place is not None and "forward" in outside[depth:]:
                nodes = nodes_of(place.statement)
                if takes_slices(place.statement, place.loops, nodes, runs_function=True):
                    return True
            if outside[depth] == "forward":
                return False
        return False

    def operations(self, file: str, line: int) -> int:
        """Returns how many operations on whole tensors the statements on a line do."""
        count = 0
        for place in self._places.at(file, line):
            if place.function not in self._operations:
                self._operations[place.function] = operations_by_statement(place.function)
            count += self._operations[place.function].get(id(place.statement), 0)
        return count

    def _is_given_by_another_file(self, stack: Stack) -> bool:
        """Whether a function that the loops of its file give one weight after the other was called from
        another file, which may give it anything."""
        files = [file for file, _, _ in stack[:2]]
        return len(set(files)) == 2 and any(place.turned for place in self._places.at(*stack[0][:2]))

    def _is_turn(self, stack: Stack, within: Within) -> bool:
        """Whether a function that an optimizer's step calls does one turn of a loop over tensors there."""
        if any(is_at_once(nodes_of(place.statement)) for place in self._places.at(*stack[0][:2])):
            return False
        for (_, _, inner), (file, line, _) in pairwise(stack):
            if inner.rpartition(".")[2] == "step":
                return False
            if PYTHON_LOOP in self.of_line(file, line, within):
                return True
        return False

    def _of_averaged_model(self, stack: Stack) -> list[str]:
        """Returns what a line does that torch's `AveragedModel` calls: the script's `avg_fn`. A learner's
        own `update_parameters(batch)` is none."""
        for (_, _, inner), (file, line, _) in pairwise(stack):
            calls = self._places.calls(file, line)
            if [last_name(call.func) for call in calls] != ["update_parameters"]:
                continue
            own = inner.rpartition(".")[2] == "update_parameters"
            if own or "AveragedModel" not in (self._places.sources.text(file) or ""):
                return []
            return [idiom for idiom in self.of_line(file, line) if idiom in (EMA, WHOLE)]
        return []

    def _is_hook(self, stack: Stack) -> bool:
        """Whether a function of the script is run by the step of an optimizer that is not the script's: by
        a hook. A closure does what trains, and tells of it."""
        for depth, (file, line, _) in enumerate(stack):
            calls = self._places.calls(file, line)
            if not any(is_call(call, {"step"}) and not call.args for call in calls):
                continue
            if self._steps_schedule(file, line):
                return False
            inner = {function.rpartition(".")[2] for _, _, function in stack[:depth]}
            return depth > 0 and not inner & {"step", "closure"}
        return False

    def _notes(self, stack: Stack) -> bool:
        """Whether a stack is in a hook of a module that only notes numbers."""
        return any(self._places.notes(file, line) for file, line, _ in stack)

    def _raises(self, file: str, line: int) -> bool:
        places = self._places.at(file, line)
        return bool(places) and all(isinstance(place.statement, ast.Raise) for place in places)

    def _makes_loss(self, file: str, line: int) -> bool:
        """Whether a statement computes a loss, or a part of it."""
        return any(
            words_of(writes(place.statement)) & LOSS_WORDS or isinstance(place.statement, ast.AugAssign)
            for place in self._places.at(file, line)
        )

    def _schedules(self, stack: Stack) -> bool:
        """Whether a stack steps a learning-rate schedule, or is in what a line calls for one."""
        for depth, (file, line, function) in enumerate(stack):
            calls = self._places.calls(file, line)
            if self._steps_schedule(file, line):
                return not depth or len(calls) == 1
            if depth and self._gives_rate(file, line, stack[depth - 1][2].rpartition(".")[2]):
                return True
            if depth and SCHEDULE in self.of_line(file, line):
                # What a rate is made with is all for that; what a schedule is given may have other uses.
                made = all(isinstance(place.statement, Assignment) for place in self._places.at(file, line))
                return made or len(calls) == 1
            if depth and words(function.rpartition(".")[2]) & OUTERMOST_WORDS:
                return False  # the loop, or a part of it, inside of something that is stepped
        return False

    def _gives_rate(self, file: str, line: int, function: str) -> bool:
        """Whether a line calls a function for a rate that it gives to another one, which sets it."""
        rates = (rate for place in self._places.at(file, line) for rate in place.given_rates)
        nodes = (node for rate in rates for node in ast.walk(rate))
        return any(is_call(node, {function}) for node in nodes)

    def _formats(self, stack: Stack) -> bool:
        """Whether a line makes text for a caller that makes text, which is written to a file."""
        if not any(formats(place.statement) for place in self._places.at(*stack[0][:2])):
            return False
        for file, line, function in stack[1:]:
            if any(makes_only(place.statement, place.texts) for place in self._places.at(file, line)):
                return True
            if words(function.rpartition(".")[2]) & OUTERMOST_WORDS:
                return False
        return False

    def _steps_schedule(self, file: str, line: int) -> bool:
        """Whether a schedule of torch's was stepped from a line, and nothing else is."""
        if (file, line) not in self._scheduled:
            return False
        return sum(is_call(call, {"step"}) for call in self._places.calls(file, line)) == 1

    def of_line(self, file: str, line: int, within: Within | None = None) -> tuple[str, ...]:
        """Returns what the statement on a line does, by itself; of several, what all of them do."""
        within = within or Within()
        known = self._known.get((file, line, within))
        if known is None:
            known = of_places(self._places.at(file, line), within)
            if self._places.writes_attention(file, line):
                known = (*known, ATTENTION)
            self._known[file, line, within] = known
        return known

    def _acts(self, stack: Stack, via: str, phase: Phase) -> str:
        """Returns `ENVIRONMENT` if a stack steps one, `ROLLOUT` if it acts in one, or nothing.

        Who steps it can measure what was learned. What an environment does inside may be called so, too: a
        position is evaluated, a move is validated.
        """
        functions = [function for _, _, function in stack]
        measured = measures(functions)
        found = "" if measured else _of_packages(functions, via, phase)
        if found == ENVIRONMENT:
            return found
        for depth, (file, line, _) in enumerate(stack):
            acting = self._acting(file, line)
            if not acting.steps and not acting.acts:
                continue
            if acting.simulates and phase in MODEL:
                continue  # the loss is made through it
            if measured and measures(functions[depth:]):
                return ""
            if acting.steps:
                # `evaluate(policy, env.reset())` is on a line that steps an environment, and no part of it.
                aside = depth > 0 and measures(functions[depth - 1 : depth]) and not acting.within
                return "" if aside else ENVIRONMENT
            if phase in ACTING and (acting.judges or not measured):
                found = ROLLOUT
        return found

    def _acting(self, file: str, line: int) -> Acting:
        if (file, line) not in self._known_acting:
            self._known_acting[file, line] = acting_of(self._places.at(file, line))
        return self._known_acting[file, line]


def _of_packages(functions: Sequence[str], via: str, phase: Phase) -> str:
    """Returns what is told of acting by the package that the time is in, or by what the functions are
    called."""
    if ENVIRONMENT_PACKAGES.match(via):
        return ENVIRONMENT
    called = [words(function.rpartition(".")[2]) for function in functions]
    learns = phase in ACTING and LEARNER_PACKAGES.match(via)
    played = phase is Phase.EVALUATION and any(plays(name) and not name & TRAINING_WORDS for name in called)
    return ROLLOUT if learns or played else ""


def is_training(via: str) -> bool:
    """Whether a package's frame, as `SourceLine.via` has it, is the loop of a trainer."""
    return not FITTERS.match(via) and bool(words(via.rpartition(" ")[2]) & TRAINING_WORDS)
