"""What a source line is there for, told from its statement: to log, to wait for a device, to clip, ..."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diagnose.analysis.attention import attention_lines
from diagnose.analysis.roles import Frame, Sources
from diagnose.analysis.slices import is_chain, takes_slices

SYNC = "sync"
"""Brings a value of a tensor to Python, for which the host waits for the device."""
LOG = "log"
"""Prints, logs, or writes to a file or over a network."""
SYNCHRONIZE = "synchronize"
"""Waits for a device, or gives its memory back, for no value."""
COLLECT = "collect"
"""Asks for a garbage collection."""
WAIT = "wait"
"""Sleeps, or waits for another process."""
SAVE = "save"
"""Writes state to disk, or makes it ready for that."""
CLIP = "clip"
"""Norms or scales gradients tensor by tensor."""
EMA = "ema"
"""Averages weights tensor by tensor."""
METRIC = "metric"
"""Scores predictions."""
SCHEDULE = "schedule"
"""Steps a learning-rate schedule."""
PYTHON_LOOP = "python-loop"
"""Loops in Python over something that is not the training data, and is none of the others."""
SLICES = "slices"
"""Besides: takes one slice of a tensor after the other, `x[:, i]`, and none needs the one before."""

CHAIN = "chain"
"""Besides: puts further elementwise operations on what the turn before has made."""
ATTENTION = "attention"
"""Besides: part of an attention that is written out."""

SYNC_METHODS = {"item", "tolist", "cpu", "numpy"}
CASTS = {"float", "int", "bool"}
LOG_FUNCTIONS = {"print", "pprint"}
LOG_METHODS = {
    *("add_scalar", "add_scalars", "add_histogram", "add_image", "add_text", "log_metric", "log_metrics"),
    *("log_dict", "log_artifact", "write", "writelines", "write_text", "write_bytes", "writerow"),
    *("writerows", "flush", "fsync", "fdatasync", "urlopen", "sendall", "savefig"),
}
LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
LOGGERS = re.compile(
    r"log|wandb|mlflow|comet|neptune|writer|tracker|board|accelerator|run$|fabric", re.IGNORECASE
)
DUMPERS = {"json", "csv", "yaml", "msgpack", "orjson"}
NETWORK = {"requests", "httpx", "urllib", "session"}
SAVERS = {
    ("torch", "save"),
    ("pickle", "dump"),
    ("pickle", "dumps"),
    ("np", "save"),
    ("np", "savez"),
    ("numpy", "save"),
}
SYNCHRONIZERS = {"synchronize", "empty_cache", "ipc_collect"}
WAITERS = {"sleep", "system", "check_call", "check_output", "communicate"}
IN_PLACE = {"mul_", "add_", "lerp_", "copy_", "sub_", "mul", "lerp"}
GRADIENT_MATH = {"norm", "vector_norm", "mul_", "clamp_", "clip_", "div_", "pow", "square", "sum", "copy_"}
METRIC_WORDS = {
    *("metric", "metrics", "accuracy", "acc", "f1", "auc", "auroc", "bleu", "rouge", "confusion"),
    *("precision", "recall", "topk", "iou", "perplexity", "meter"),
}
ALSO_OF_MODELS = {"acc", "meter", "precision", "recall", "topk", "iou"}
"""Words that functions of models and losses are called by, too."""

NAMED = {
    **dict.fromkeys(("log", "logging", "logs", "report", "print", "tensorboard", "wandb"), LOG),
    **dict.fromkeys(("ema", "averaged", "shadow"), EMA),
    **dict.fromkeys(("clip", "clipping"), CLIP),
    **dict.fromkeys(METRIC_WORDS - ALSO_OF_MODELS, METRIC),
}
"""What a function is for by a word of its name, where its lines do not say."""

PURPOSES = frozenset((LOG, EMA, CLIP, METRIC, SAVE))
"""What a whole function may be there for. Its other lines, which build a record, serve that."""

OUTERMOST_WORDS = {"train", "training", "trainer", "main", "fit", "run", "epoch", "loop", "module"}
"""A function so named is the loop: what it is called says nothing of a single line."""

TRAINING_WORDS = {"train", "training", "trainer", "fit", "epoch"}
"""In the name of a package's function that the time is in: it is the training's, whatever else the line
does. `print(trainer.train())` is no logging."""

HOOKED_CALLS = {"backward", "step", "zero_grad"}
"""Calls whose time is measured apart: beside them a line's time is that of what else it does."""

METRIC_PACKAGES = re.compile(r"^(torchmetrics|torcheval|sklearn/metrics|evaluate|ignite/metrics)\b")


@dataclass(frozen=True, slots=True)
class _Place:
    """A statement and what surrounds it in its function, innermost first."""

    statement: ast.stmt
    loops: tuple[ast.For | ast.AsyncFor | ast.While, ...]


class Idioms:
    """Answers what a sampled line does.

    Args:
        sources: Text of each file; a file without text has no idioms.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._files: dict[str, dict[int, list[_Place]]] = {}
        self._attention: dict[str, set[int]] = {}
        self._known: dict[tuple[str, int], tuple[str, ...]] = {}

    def of(self, stack: Sequence[Frame], via: str = "") -> tuple[str, ...]:
        """Returns the idioms of a stack: those of its innermost line, then what the functions are called.

        Args:
            stack: File, line and function of each user frame, innermost first.
            via: The frame of an installed package inside it, as `SourceLine.via` has it.
        """
        if not stack:
            return ()
        found = [] if is_training(via) else list(self.of_line(*stack[0][:2]))
        if METRIC_PACKAGES.match(via) and METRIC not in found:
            found.insert(0, METRIC)
        for _, _, function in stack:
            words = _words(".".join(part for part in function.split(".")[-2:] if part != "<locals>"))
            if words & OUTERMOST_WORDS or function == "<module>":
                break
            named = [idiom for word, idiom in NAMED.items() if word in words]
            if named:
                # Reading a value or looping is how a thing is done; the name says what it is done for.
                found = [*dict.fromkeys([*named[:1], *(idiom for idiom in found if idiom != PYTHON_LOOP)])]
                break
        return tuple(found)

    def of_line(self, file: str, line: int) -> tuple[str, ...]:
        """Returns what the statement on a line does, by itself; of several, what all of them do."""
        known = self._known.get((file, line))
        if known is None:
            if file not in self._files:
                tree = self._sources.tree(file)
                self._files[file] = _by_line(tree) if tree is not None else {}
                self._attention[file] = attention_lines(tree) if tree is not None else set()
            known = _common(self._files[file].get(line, []))
            if line in self._attention[file]:
                known = (*known, ATTENTION)
            self._known[file, line] = known
        return known


def is_training(via: str) -> bool:
    """Whether a package's frame, as `SourceLine.via` has it, is the loop of a trainer."""
    return bool(_words(via.rpartition(" ")[2]) & TRAINING_WORDS)


def _by_line(tree: ast.Module) -> dict[int, list[_Place]]:
    """Returns the statements on each line, without those that go on in another one there."""
    lines: dict[int, list[_Place]] = {}
    for line, place in _places(tree):
        others = [each for each in lines.get(line, []) if place.statement not in ast.walk(each.statement)]
        lines[line] = [*others, place]
    return lines


def _common(places: Sequence[_Place]) -> tuple[str, ...]:
    """Returns what all statements of a line do: the sampler does not tell which of them took the time."""
    found = [tuple(_idioms(place)) for place in places]
    if len(found) > 1:
        found = [each for each, place in zip(found, places, strict=True) if each or _takes_time(place)]
    return tuple(idiom for idiom in found[0] if all(idiom in each for each in found)) if found else ()


def _takes_time(place: _Place) -> bool:
    """Whether a statement calls or repeats anything that is not measured apart."""
    nodes = [node for expression in _expressions(place.statement) for node in ast.walk(expression)]
    return any(isinstance(node, ast.comprehension) for node in nodes) or any(
        isinstance(node, ast.Call) and _callee(node)[0] not in HOOKED_CALLS for node in nodes
    )


def _idioms(place: _Place) -> Iterator[str]:
    """Yields what a statement does, the most telling first."""
    found: set[str] = set()
    nodes = [node for expression in _expressions(place.statement) for node in ast.walk(expression)]
    in_comprehension = {
        id(inner)
        for node in nodes
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
        for inner in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Call):
            found.update(_of_call(node, within=id(node) in in_comprehension))
    names = _names(nodes)
    if "argmax" in names and any(isinstance(node, ast.Compare) for node in nodes):
        found.add(METRIC)
    if isinstance(place.statement, (ast.If, ast.While, ast.Assert)) and _tensor_test(place.statement.test):
        found.add(SYNC)
    iterated = _iterated(place, nodes)
    over_weights = any(_over_weights(source) for source in iterated)
    if over_weights and names & {"grad", "grads"} and names & GRADIENT_MATH:
        found.add(CLIP)
    elif over_weights and (names & IN_PLACE or _assigns(place.statement)):
        pairs = any(_names(list(ast.walk(source))) & {"zip", "_foreach"} for source in iterated)
        words = set().union(*(_words(name) for name in names))
        if pairs or words & {"ema", "shadow", "avg", "average", "averaged", "target", "teacher", "decay"}:
            found.add(EMA)
    if isinstance(place.statement, (ast.For, ast.AsyncFor)):
        for inner in place.statement.body:
            within = _Place(inner, (place.statement, *place.loops))
            found.update(idiom for idiom in _idioms(within) if idiom in (CLIP, EMA))
    for idiom in (LOG, CLIP, EMA, METRIC, SAVE, SYNCHRONIZE, COLLECT, WAIT, SCHEDULE, SYNC):
        if idiom in found:
            yield idiom
    if not found and (in_comprehension or _in_side_loop(place)):
        yield PYTHON_LOOP
        if takes_slices(place.statement, place.loops, nodes):
            yield SLICES
        if is_chain(place.statement, place.loops, nodes):
            yield CHAIN


def _of_call(call: ast.Call, *, within: bool) -> Iterator[str]:
    """Yields what one call does; `within` a comprehension, a cast is of Python's numbers."""
    name, base = _callee(call)
    owner = base.rpartition(".")[2] or base
    if (name in SYNC_METHODS and base not in ("np", "torch")) or _to_cpu(call, name):
        yield SYNC
    if not base and name in CASTS and not within and call.args and _may_be_tensor(call.args[0]):
        yield SYNC
    if (
        (not base and name in LOG_FUNCTIONS | {"open", "urlopen"})
        or (base and name in LOG_METHODS)
        or (name in LEVELS and LOGGERS.search(base))
        or (owner in DUMPERS and name in ("dump", "dumps"))
        or (owner in NETWORK and name in ("get", "post", "put", "request"))
    ):
        yield LOG
    if name in SYNCHRONIZERS:
        yield SYNCHRONIZE
    if (owner, name) == ("gc", "collect"):
        yield COLLECT
    if name in WAITERS or (owner == "subprocess" and name in ("run", "call")):
        yield WAIT
    if (owner, name) in SAVERS or name in ("copyfile", "copytree", "copy2"):
        yield SAVE
    if name.startswith("clip_grad") and _keyword(call, "foreach") is False:
        yield CLIP
    if name == "update_parameters":
        yield EMA
    if name == "step" and "sched" in base.lower():
        yield SCHEDULE
    if (_words(name) | (_words(owner) if name in ("update", "compute", "add") else set())) & METRIC_WORDS:
        yield METRIC


def _callee(call: ast.Call) -> tuple[str, str]:
    """Returns what is called and on what: `("item", "loss")`; the latter is only a hint."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id, ""
    if isinstance(function, ast.Attribute):
        return function.attr, ast.unparse(function.value)
    return "", ""


def _to_cpu(call: ast.Call, name: str) -> bool:
    return name == "to" and any(
        isinstance(arg, ast.Constant) and arg.value == "cpu"
        for arg in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def _may_be_tensor(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        _, base = _callee(node)
        return bool(base) and base not in ("time", "math", "os", "random", "np", "input", "f")
    return isinstance(node, (ast.Name, ast.Subscript))


def _tensor_test(test: ast.expr) -> bool:
    """Whether a condition asks a tensor: it calls one of torch's predicates."""
    predicates = {"isnan", "isinf", "isfinite", "allclose", "equal", "any", "all"}
    return any(
        isinstance(node, ast.Call)
        and _callee(node)[0] in predicates
        and _callee(node)[1] not in ("", "math", "np")
        for node in ast.walk(test)
    )


def _keyword(call: ast.Call, name: str) -> object:
    for keyword in call.keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


def _iterated(place: _Place, nodes: list[ast.AST]) -> list[ast.expr]:
    """Returns what the loops around and in a statement go over."""
    around = [loop.iter for loop in place.loops if isinstance(loop, (ast.For, ast.AsyncFor))]
    if isinstance(place.statement, (ast.For, ast.AsyncFor)):
        around.append(place.statement.iter)
    return [*around, *(node.iter for node in nodes if isinstance(node, ast.comprehension))]


def _over_weights(source: ast.expr) -> bool:
    words = {"parameters", "named_parameters", "params", "state_dict", "grads", "param_groups"}
    return bool(_names(list(ast.walk(source))) & words)


def _in_side_loop(place: _Place) -> bool:
    """Whether a loop goes around the statement that trains nothing."""
    return any(
        not any(
            isinstance(node, ast.Call) and _callee(node)[0] in ("backward", "step", "train_step")
            for node in ast.walk(loop)
        )
        for loop in place.loops
    )


def _assigns(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Assign, ast.AugAssign))


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }


def _words(name: str) -> set[str]:
    """Returns the words of a name, in small letters: `logMetrics_v2` has log, metrics and v2."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yields a statement's own expressions, without those of statements in it."""
    for _, value in ast.iter_fields(statement):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.expr):
                yield item
            elif isinstance(item, ast.withitem):
                yield item.context_expr


def _places(tree: ast.Module) -> Iterator[tuple[int, _Place]]:
    """Yields each line that holds code, outer statements before those in them."""
    pending: list[tuple[ast.AST, tuple[ast.For | ast.AsyncFor | ast.While, ...]]] = [(tree, ())]
    while pending:
        node, loops = pending.pop(0)
        if isinstance(node, ast.stmt) and not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            place = _Place(node, loops)
            inner = [
                child.lineno
                for child in ast.walk(node)
                if isinstance(child, (ast.stmt, ast.ExceptHandler)) and child is not node
            ]
            end = min(inner) - 1 if inner else node.end_lineno or node.lineno
            for line in range(node.lineno, max(end, node.lineno) + 1):
                yield line, place
        inside = (node, *loops) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) else loops
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside = ()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                pending.append((child, inside))
