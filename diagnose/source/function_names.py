"""What a function is there for by what it is called, where its lines do not say."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence

from diagnose.source.call_idioms import ALSO_OF_MODELS, LEARNING_WORDS, METRIC_WORDS
from diagnose.source.calling import called_in, callee, calls_of
from diagnose.source.kinds import Assignment, Function
from diagnose.source.names import last_name, names_in, words, words_of
from diagnose.source.places import Places
from diagnose.source.purposes import CLIP, EMA, LOG, METRIC, SAVE
from diagnose.source.reads_writes import APPENDS, REORDERS, in_place, writes
from diagnose.source.sites import Stack
from diagnose.source.statements import statements_of, text_of

MATH_NAMES = """
    cosh density det exp gamma likelihood mel odds partition pdf prob probability probs ratio scale sigmoid
    softmax softplus space spectrogram std stft sum var variance
"""
MATH_WORDS = frozenset(MATH_NAMES.split())
"""Beside one of these, `log` in a name is the logarithm."""
MATH_MODULES = {"math", "np", "numpy", "torch"}
REDUCES = {"sum", "fsum", "mean", "float", "max", "min", "abs", "item"}
"""Calls that give a number."""
GRADIENT_WORDS = {"grad", "grads", "gradient", "gradients"}
LOG_WORDS = ("log", "logging", "logs", "report", "print", "tensorboard", "wandb", "logger")

NAMED = {
    **dict.fromkeys(LOG_WORDS, LOG),
    **dict.fromkeys(("ema", "averaged", "shadow"), EMA),
    **dict.fromkeys(("clip", "clipping", "clipper"), CLIP),
    **dict.fromkeys((METRIC_WORDS - ALSO_OF_MODELS) | {"recall", "iou"}, METRIC),
}
"""What a function is for by a word of its name or its class's, where its lines do not say."""

SHOWS = ("display", "plot", "plots", "visualize", "visualizer", "visuals", "summarize")
NAMED_BESIDE = {
    **dict.fromkeys(SHOWS, LOG),
    **NAMED,
    **dict.fromkeys(ALSO_OF_MODELS - {"acc", "meter", "precision", "topk"}, METRIC),
}
"""Likewise, where no model computes: there `joint_errors` are a score."""

PURPOSES = frozenset((LOG, EMA, CLIP, METRIC, SAVE))
"""What a whole function may be there for. Its other lines, which build a record, serve that."""

OUTERMOST_WORDS = {"train", "training", "trainer", "main", "fit", "run", "epoch", "loop", "module"}
"""A function so named is the loop: what it is called says nothing of a single line."""


class FunctionNames:
    """Answers what functions are there for by what they are called, and by what `of_line` tells of the
    statement on a line of a file."""

    def __init__(self, places: Places, of_line: Callable[[str, int], Collection[str]]) -> None:
        self._places = places
        self._of_line = of_line
        self._words: dict[Function, set[str]] = {}

    def purpose(self, stack: Stack, purposes: Mapping[str, str]) -> str:
        """Returns what the innermost function with a telling name is for; empty if there is none.

        What a module's `forward` calls is a part of it, whatever it is called.
        """
        named = ""
        for file, line, function in stack:
            if function.rpartition(".")[2] == "forward":
                named = ""
                continue
            *around, own = [part for part in function.split(".")[-2:] if part != "<locals>"]
            if words(own) & OUTERMOST_WORDS or function == "<module>":
                break
            # What a `MetricTrainer` is called says nothing of each of its methods.
            parts = [*(part for part in around if not words(part) & OUTERMOST_WORDS), own]
            named = named or self._by_name(file, line, parts, purposes)
        return named

    def _by_name(self, file: str, line: int, parts: Sequence[str], purposes: Mapping[str, str]) -> str:
        """Returns what a function is for by its name and its class's, if its code does not contradict."""
        of_name = words(".".join(parts))
        for word, purpose in purposes.items():
            if word not in of_name:
                continue
            if of_name & {LOG: MATH_WORDS, METRIC: LEARNING_WORDS}.get(purpose, set()):
                continue
            if purpose == LOG and self._only_scores(file, line, word, of_name, purposes):
                continue
            if word == "log" and self._is_logarithm(file, line, parts):
                continue
            if purpose == CLIP and not (of_name | self._words_at(file, line)) & GRADIENT_WORDS:
                continue
            if purpose == CLIP and self._has_torch_clip(file, line):
                continue
            sure = word in words(parts[-1]) and not of_name & METRIC_WORDS  # `averaged_precision`
            if purpose == EMA and not sure and not self._averages(file, line):
                continue
            return purpose
        return ""

    def _only_scores(
        self, file: str, line: int, word: str, of_name: frozenset[str], purposes: Mapping[str, str]
    ) -> bool:
        """Whether a function that is named for logging and for a score logs nothing: `AccuracyLogger.log`.

        Metrics are what is logged, `log_metrics`, but for a `MetricLogger`.
        """
        scores = {each for each in of_name if purposes.get(each) == METRIC}
        if word != "logger":
            scores -= {"metric", "metrics"}
        return bool(scores) and not self._logs(file, line)

    def _is_logarithm(self, file: str, line: int, parts: Sequence[str]) -> bool:
        """Whether `log` in a function's own name is the logarithm, or a test's: it returns a number that it
        has computed, and neither logs nor tells another anything. `log_loss`, `log_rank`."""
        if any("log" in words(part) for part in parts[:-1]):
            return False
        statements = list(statements_of(self._function_at(file, line)))
        if any(map(_tells, statements)):
            return False
        numbers = {
            name
            for each in statements
            if isinstance(each, Assignment) and each.value is not None and _is_number(each.value)
            for name in writes(each)
        }
        returned = (each.value for each in statements if isinstance(each, ast.Return))
        computes = any(value is not None and _is_number(value, numbers) for value in returned)
        return computes and not self._logs(file, line)

    def _logs(self, file: str, line: int) -> bool:
        """Whether the function that holds a line logs, or what it calls in the same file does."""
        pending = [self._function_at(file, line)]
        seen: set[Function | None] = {None}
        while pending:
            function = pending.pop()
            if function in seen:
                continue
            seen.add(function)
            for statement in statements_of(function):
                if LOG in self._of_line(file, statement.lineno):
                    return True
                for name, base in map(callee, calls_of(statement)):
                    known = self._places.functions(file, name)
                    if not known and base == "self" and words(name) & {*LOG_WORDS}:
                        return True  # a base class's: `self.log("accuracy", hits)`
                    pending += known
        return False

    def _has_torch_clip(self, file: str, line: int) -> bool:
        """Whether a line, or all of the function that holds it, leaves the clipping to torch, which does it
        at once."""
        found = list(statements_of(self._function_at(file, line)))
        by_hand = any(CLIP in self._of_line(file, statement.lineno) for statement in found)
        if by_hand:
            found = [place.statement for place in self._places.at(file, line)]
        called = {name for each in found for name in called_in(each)}
        clips = [name for name in called if name.startswith("clip_grad")]
        return not all(self._places.functions(file, name) for name in clips)

    def _averages(self, file: str, line: int) -> bool:
        return bool(self._words_at(file, line) & {"parameters", "params", "state", "weights", "buffers"})

    def _function_at(self, file: str, line: int) -> Function | None:
        return next((place.function for place in self._places.at(file, line)), None)

    def _words_at(self, file: str, line: int) -> set[str]:
        """Returns the words of all names in the function that holds a line."""
        function = self._function_at(file, line)
        if function is None:
            return set()
        if function not in self._words:
            self._words[function] = words_of(names_in(function))
        return self._words[function]


def _tells(statement: ast.stmt) -> bool:
    """Whether a statement calls something for no result, such as `producer.send(row)`; not where it only
    changes what is in hand."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    if not isinstance(value, ast.Call):
        return False
    name = last_name(value.func)
    return name not in APPENDS | REORDERS and not in_place(name)


def _is_number(value: ast.expr, numbers: Collection[str] = ()) -> bool:
    """Whether a value is a number, or a tensor, that is computed where it stands, or one of the names of
    such: no text, and no record."""
    if isinstance(value, ast.Name):
        return value.id in numbers
    if isinstance(value, ast.Call):
        name, base = callee(value)
        return name in REDUCES or base in MATH_MODULES
    nodes = list(ast.walk(value))
    keys = {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    texts = (node for node in nodes if text_of(node) is not None)
    return isinstance(value, (ast.BinOp, ast.UnaryOp)) and all(id(text) in keys for text in texts)
