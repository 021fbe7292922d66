"""What a statement is there for, told from its syntax: to log, to wait for a device, to clip, ..."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from diagnose.analysis.slices import is_chain, takes_slices
from diagnose.analysis.statements import Place, callee, names, nodes_of, words, words_of
from diagnose.analysis.weights import ASKED

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
UPDATE = "update"
"""Updates weights by their gradients, tensor by tensor."""
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

HOOK = "hook"
"""Besides: the optimizer calls it before or after its step, as it was asked to."""

ENVIRONMENT = "environment"
"""Steps the environment of a reinforcement learner, or is inside such a step. Alone."""
ROLLOUT = "rollout"
"""Besides: chooses what to do in an environment. A model that is called so acts, and is not judged."""

SYNC_METHODS = {"item", "tolist", "cpu", "numpy"}
CASTS = {"float", "int", "bool"}
PREDICATES = {"isnan", "isinf", "isfinite", "allclose", "equal", "any", "all"}
CHEAP = {"detach", "append", "extend", "add", "size", "dim", "len", "numel", "get", "setdefault", "round"}
"""Calls beside which reading a value is still all that a statement does."""
LOG_FUNCTIONS = {"print", "pprint"}
LOG_METHODS = {
    *("add_scalar", "add_scalars", "add_histogram", "add_image", "add_text", "log_metric", "log_metrics"),
    *("log_dict", "log_artifact", "write", "writelines", "write_text", "write_bytes", "writerow"),
    *("writerows", "flush", "fsync", "fdatasync", "urlopen", "sendall", "savefig", "savetxt", "tofile"),
    *("imsave", "imwrite", "save_image", "to_csv", "to_json", "to_parquet", "to_feather", "to_excel"),
    *("set_postfix", "set_postfix_str", "set_description", "set_description_str"),
}
ALSO_OF_MEMORIES = {"write", "flush"}
"""Methods that models with a memory have, too."""
FILES = {"file", "f", "fh", "fp", "out", "output", "log", "logs", "stdout", "stderr", "csv", "stream"}

LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
LOGGERS = re.compile(
    r"(log|logs|logging)$|logger|wandb|mlflow|comet|neptune|writer|tracker|board|accelerator|run$|fabric",
    re.IGNORECASE,
)
"""What one of the names before the method's is called: `log`, but not `logits`."""
WRITES_TABLE = re.compile(r"\s*(insert|update|replace|delete)\b", re.IGNORECASE)
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
WAITERS = {"sleep", "system", "check_call", "check_output", "communicate", "flock", "lockf"}
JOINS = {
    "wait": frozenset({"process", "proc", "popen", "child", "event", "stop", "barrier", "condition"}),
    "join": frozenset({"thread", "process", "proc", "worker", "workers", "pool", "queue"}),
    "result": frozenset({"future", "fut", "job", "task", "pending"}),
    "get": frozenset({"queue", "inbox", "mailbox"}),
    "acquire": frozenset({"lock", "mutex", "semaphore"}),
    "select": frozenset({"select", "selector", "selectors"}),
    "poll": frozenset({"poller", "epoll"}),
    "accept": frozenset({"socket", "server", "listener"}),
}
"""Methods that wait for another thread or process, by a word of what they are called on: `handle.wait()`
is a collective, and `", ".join()` a text."""
RECEIVERS = {"recv", "recvfrom", "recv_into", "recv_bytes", "recv_json", "recv_pyobj", "recv_string"}
WRITES = {"mul_", "add_", "lerp_", "copy_", "sub_"}
IN_PLACE = {*WRITES, "mul", "lerp"}
GRADIENT_MATH = {"norm", "vector_norm", "clamp_", "clip_", "pow", "square", "sum"}
GRADIENTS = {"grad", "grads", "gradients"}
SCALES = {"mul_", "div_"}
CLIPPING_WORDS = {"clip", "clipped", "coef", "coefficient", "norm", "max", "scale"}
AVERAGING_WORDS = {"world", "size", "ranks", "steps", "accumulation", "loss", "inv"}
"""Gradients are also scaled to be averaged among ranks, or over micro-batches, or as their loss was."""
METRIC_WORDS = {
    *("metric", "metrics", "accuracy", "acc", "f1", "auc", "auroc", "auprc", "bleu", "rouge", "confusion"),
    *("precision", "recall", "topk", "iou", "perplexity", "meter", "ndcg", "mrr", "wer", "cer", "psnr"),
    *("ssim", "dice", "jaccard", "mae", "mape", "rmse", "spearman", "kendall", "kappa", "mcc", "ece"),
    *("error", "errors", "calibration"),
}
ALSO_OF_MODELS = {
    *(
        "acc",
        "meter",
        "precision",
        "recall",
        "topk",
        "iou",
        "psnr",
        "ssim",
        "dice",
        "jaccard",
        "mae",
        "mape",
    ),
    *("rmse", "spearman", "kendall", "error", "errors", "calibration"),
}
"""Words that functions of models and losses are called by, too."""

LEARNING_WORDS = frozenset({"learner", "learning", "loss"})
"""Beside one of these, `metric` is what is learned."""
AVERAGED_WORDS = {"ema", "shadow", "avg", "average", "averaged", "target", "teacher", "decay"}

OVER_WEIGHTS = {*ASKED, "params", "grads", "param_groups"}

HOOKED_CALLS = {"backward", "step", "zero_grad"}
"""Calls whose time is measured apart: beside them a line's time is that of what else it does."""


class Within(NamedTuple):
    """Where a line's time passed.

    Attributes:
        model: In the forward or backward pass.
        loss: In the forward pass, so that the loss may depend on it.
        module: In the `forward` of a module.
        waits: On a device, for which a value that is read is waited for.
        stepping: In the step of an optimizer that the script has written itself.
    """

    model: bool = False
    loss: bool = False
    module: bool = False
    waits: bool = True
    stepping: bool = False


def of_places(places: Sequence[Place], within: Within) -> tuple[str, ...]:
    """Returns what all statements of a line do: the sampler does not tell which of them took the time."""
    found = [tuple(_idioms(place, within)) for place in places]
    if len(found) > 1:
        found = [each for each, place in zip(found, places, strict=True) if each or _takes_time(place)]
    return tuple(idiom for idiom in found[0] if all(idiom in each for each in found)) if found else ()


def _takes_time(place: Place) -> bool:
    """Whether a statement calls or repeats anything that is not measured apart."""
    nodes = nodes_of(place.statement)
    return any(isinstance(node, ast.comprehension) for node in nodes) or any(
        isinstance(node, ast.Call) and callee(node)[0] not in HOOKED_CALLS for node in nodes
    )


def _idioms(place: Place, within: Within) -> Iterator[str]:
    """Yields what a statement does, the most telling first."""
    found: set[str] = set()
    nodes = nodes_of(place.statement)
    in_comprehension = {
        id(inner)
        for node in nodes
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
        for inner in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Call):
            found.update(_of_call(node, within, in_comprehension=id(node) in in_comprehension))
    if "argmax" in names(nodes) and any(isinstance(node, ast.Compare) for node in nodes):
        found.add(METRIC)
    if isinstance(place.statement, (ast.If, ast.While, ast.Assert)) and _tensor_test(place.statement.test):
        found.add(SYNC)
    if not within.stepping:
        found.update(_of_weights(place, nodes))
    if isinstance(place.statement, (ast.For, ast.AsyncFor)):
        for inner in place.statement.body:
            inside = replace(place, statement=inner, loops=(place.statement, *place.loops))
            found.update(idiom for idiom in _idioms(inside, within) if idiom in (CLIP, EMA, UPDATE))
    if isinstance(
        place.statement, (ast.With, ast.AsyncWith)
    ):  # whose end writes what its body has to write
        calls = (node for inner in place.statement.body for node in ast.walk(inner))
        if any(isinstance(call, ast.Call) and _writes_table(call, callee(call)[0]) for call in calls):
            found.add(LOG)
    if within.loss:
        found.discard(CLIP)  # of norms that the loss punishes
    if within.module:
        found.discard(METRIC)
    if not within.waits and not _only_reads(nodes):
        found.discard(SYNC)
    for idiom in (LOG, CLIP, EMA, UPDATE, METRIC, SAVE, SYNCHRONIZE, COLLECT, WAIT, SCHEDULE, SYNC):
        if idiom in found:
            yield idiom
    if not found and (in_comprehension or _in_side_loop(place)):
        yield PYTHON_LOOP
        if takes_slices(place.statement, place.loops, nodes):
            yield SLICES
        if is_chain(place.statement, place.loops, nodes):
            yield CHAIN


def _of_weights(place: Place, nodes: list[ast.AST]) -> Iterator[str]:
    """Yields what a statement does to one weight after the other."""
    iterated = _iterated(place, nodes)
    gone_over = names(node for source in iterated for node in ast.walk(source))
    gradients = gone_over & place.gradients
    if not gradients and not gone_over & (OVER_WEIGHTS | place.weights):
        if iterated and any(map(_blends, nodes)) and _knows_weights(place):
            yield EMA  # of what was kept of them: `{k: d * v + (1 - d) * now[k] for k, v in kept.items()}`
        return
    used = names(nodes)
    if gradients or (used | gone_over) & GRADIENTS:
        told = words_of(used)
        scales = used & SCALES and told & CLIPPING_WORDS and not told & AVERAGING_WORDS
        if used & GRADIENT_MATH or scales:
            yield CLIP
        elif _updates(place, nodes):
            yield UPDATE
        return
    decays_weights = {name for name in used if {"weight", "decay"} <= words(name)}
    told = words_of(used - decays_weights) & AVERAGED_WORDS
    assigns = isinstance(place.statement, (ast.Assign, ast.AugAssign))
    in_pairs = gone_over & {"zip", "_foreach"} and (used & WRITES or _assigns_in_place(place.statement))
    if in_pairs or (told and (used & IN_PLACE or assigns)) or any(map(_blends, nodes)):
        yield EMA


def _updates(place: Place, nodes: list[ast.AST]) -> bool:
    """Whether a statement changes in place what a loop goes over, and not gradients: `p -= lr * p.grad`."""
    statement = place.statement
    changed: list[ast.expr] = []
    if isinstance(statement, ast.AugAssign):
        changed = [statement.target]
    elif isinstance(statement, ast.Assign) and any(isinstance(node, ast.BinOp) for node in nodes):
        changed = [target for target in statement.targets if not isinstance(target, ast.Name)]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in WRITES - {"copy_"}:
            changed = [function.value]
    turns = names(
        node for loop in place.loops if not isinstance(loop, ast.While) for node in ast.walk(loop.target)
    )
    return any(
        not names(ast.walk(each)) & GRADIENTS and (not isinstance(each, ast.Name) or each.id in turns)
        for each in changed
    )


def _blends(node: ast.AST) -> bool:
    """Whether an expression goes a part of the way from one value to another: `a * (1 - r) + b * r`."""
    if isinstance(node, ast.Call):
        return callee(node)[0] in ("lerp", "lerp_")
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    sides = (node.left, node.right)
    return all(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult) for side in sides) and any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Sub)
        and isinstance(part.left, ast.Constant)
        and part.left.value == 1
        for side in sides
        for part in ast.walk(side)
    )


def _of_call(call: ast.Call, within: Within, *, in_comprehension: bool) -> Iterator[str]:
    """Yields what one call does; in a comprehension a cast is of Python's numbers."""
    name, base = callee(call)
    owner = base.rpartition(".")[2] or base
    if (name in SYNC_METHODS and base not in ("np", "torch")) or _to_cpu(call, name):
        yield SYNC
    if not base and name in CASTS and not in_comprehension and call.args and _may_be_tensor(call.args[0]):
        yield SYNC
    if _waits_for(call, name, owner):
        yield WAIT
    elif (
        name in LOG_FUNCTIONS
        or (not base and name in {"open", "urlopen"})
        or (base and name in LOG_METHODS and not _of_a_memory(name, owner, within))
        or (name in LEVELS and (name != "log" or call.args or call.keywords) and _is_logger(base))
        or (base and name in LEVELS - {"log"} and call.args and _is_text(call.args[0]))
        or (owner in DUMPERS and name in ("dump", "dumps"))
        or (owner in NETWORK and name in ("get", "post", "put", "request"))
        or _writes_table(call, name)
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
    averages = words(name) & {"update", "step"} and "ema" in words(name) | words(owner)
    if name == "update_parameters" or (averages and not within.model):
        yield EMA
    if name == "step" and "sched" in base.lower():
        yield SCHEDULE
    called = words(name) | (words(owner) if name in ("update", "compute", "add") else set())
    scores = METRIC_WORDS - ALSO_OF_MODELS if within.loss else METRIC_WORDS
    # The largest values of a tensor are no score, and `log.error` no error of a prediction.
    if called & scores and name not in ("topk", "error") and not called & LEARNING_WORDS:
        yield METRIC


def _waits_for(call: ast.Call, name: str, owner: str) -> bool:
    """Whether a call waits for another process or thread, but a rank: `p.stdout.readline()`."""
    if name in RECEIVERS:
        return owner not in ("dist", "distributed")
    if name in JOINS:
        return bool(words(owner) & JOINS[name]) or (name == "wait" and bool(call.args))
    if name in LOG_FUNCTIONS:
        file = next((keyword.value for keyword in call.keywords if keyword.arg == "file"), None)
        return isinstance(file, ast.Attribute) and file.attr == "stdin"
    return owner == "stdin" or (owner == "stdout" and name.startswith("read"))


def _writes_table(call: ast.Call, name: str) -> bool:
    """Whether a call writes to a database: `db.execute("INSERT ...")`, `connection.commit()`."""
    if name in ("commit", "executemany"):
        return True
    query = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    return name == "execute" and isinstance(query, str) and bool(WRITES_TABLE.match(query))


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is a text that is written out there."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_logger(base: str) -> bool:
    return any(LOGGERS.search(part) for part in re.findall(r"\w+", base))


def _of_a_memory(name: str, owner: str, within: Within) -> bool:
    """Whether `memory.write(key, value)` is a part of a model: nothing says that this is a file."""
    return within.model and name in ALSO_OF_MEMORIES and not words(owner) & FILES


def _only_reads(nodes: Sequence[ast.AST]) -> bool:
    """Whether bringing values to Python is all that a statement does."""
    cheap = SYNC_METHODS | CASTS | PREDICATES | CHEAP
    return all(
        callee(node)[0] in cheap or _to_cpu(node, callee(node)[0])
        for node in nodes
        if isinstance(node, ast.Call)
    )


def _to_cpu(call: ast.Call, name: str) -> bool:
    return name == "to" and any(
        isinstance(arg, ast.Constant) and arg.value == "cpu"
        for arg in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def _may_be_tensor(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        _, base = callee(node)
        return bool(base) and base not in ("time", "math", "os", "random", "np", "input", "f")
    return isinstance(node, (ast.Name, ast.Subscript))


def _tensor_test(test: ast.expr) -> bool:
    """Whether a condition asks a tensor: it calls one of torch's predicates."""
    return any(
        isinstance(node, ast.Call)
        and callee(node)[0] in PREDICATES
        and callee(node)[1] not in ("", "math", "np")
        for node in ast.walk(test)
    )


def _keyword(call: ast.Call, name: str) -> object:
    for keyword in call.keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


def _iterated(place: Place, nodes: list[ast.AST]) -> list[ast.expr]:
    """Returns what the loops around and in a statement go over."""
    around = [loop.iter for loop in place.loops if isinstance(loop, (ast.For, ast.AsyncFor))]
    if isinstance(place.statement, (ast.For, ast.AsyncFor)):
        around.append(place.statement.iter)
    return [*around, *(node.iter for node in nodes if isinstance(node, ast.comprehension))]


def _knows_weights(place: Place) -> bool:
    """Whether the function around a statement asks a model for its weights, and what is averaged is named
    for that."""
    if place.function is None:
        return False
    known = names(ast.walk(place.function))
    return bool(known & ASKED) and bool(words_of(known) & AVERAGED_WORDS)


def _in_side_loop(place: Place) -> bool:
    """Whether a loop goes around the statement that trains nothing."""
    return any(
        not any(
            isinstance(node, ast.Call) and callee(node)[0] in ("backward", "step", "train_step")
            for node in ast.walk(loop)
        )
        for loop in place.loops
    )


def _assigns_in_place(statement: ast.stmt) -> bool:
    """Whether a statement writes into something there is: `average.data = ...`, `shadow[name] = ...`."""
    if isinstance(statement, ast.AugAssign):
        return True
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, (ast.Attribute, ast.Subscript)) for target in statement.targets
    )
