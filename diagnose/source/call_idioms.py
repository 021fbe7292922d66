"""What a call is there for, told from its names and what it is given: to log, to save, to wait, ..."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from diagnose.source.calling import called_in, callee, calls_of, given_to, is_call, keyword_of
from diagnose.source.copied_weights import copies_weights
from diagnose.source.files import (
    DUMPERS,
    RENAMERS,
    SAVERS,
    STATE_FILES,
    WRITERS,
    file_written,
    opens_to_write,
    origin,
    writes_table,
)
from diagnose.source.names import last_name, names_in, words, words_of
from diagnose.source.place import Place
from diagnose.source.purposes import (
    CLIP,
    COLLECT,
    EMA,
    LOG,
    METRIC,
    SAVE,
    SCHEDULE,
    SYNC,
    SYNCHRONIZE,
    WAIT,
    WHOLE,
)
from diagnose.source.reads_writes import reads, writes
from diagnose.source.statements import nodes_of, statements_in, statements_of, text_of
from diagnose.source.tensor_values import PREDICATES, may_be_tensor
from diagnose.source.texts import FILES
from diagnose.source.weight_loops import clips_one, sources

SYNC_METHODS = {"item", "tolist", "cpu", "numpy"}
CASTS = {"float", "int", "bool"}
CHEAP = {"detach", "append", "extend", "add", "size", "dim", "len", "numel", "get", "setdefault", "round"}
"""Calls beside which reading a value is still all that a statement does."""
LOG_FUNCTIONS = {"print", "pprint"}
LOG_METHODS = {
    *("add_scalar", "add_scalars", "add_histogram", "add_image", "add_text", "log_metric", "log_metrics"),
    *("log_dict", "log_artifact", "write", "writelines", "write_text", "write_bytes", "writerow"),
    *("writerows", "flush", "fsync", "fdatasync", "urlopen", "sendall", "savefig", "savetxt", "tofile"),
    *("imsave", "imwrite", "save_image", "to_csv", "to_json", "to_parquet", "to_feather", "to_excel"),
    *("to_sql", "to_hdf", "to_pickle", "write_table", "writestr", "sendto"),
    *("set_postfix", "set_postfix_str", "set_description", "set_description_str"),
}
IMPORTED = re.compile(
    r"(torchvision\.utils\.save_image|cv2\.imwrite|(imageio|skimage\.io)(\.v\d)?\.(imwrite|imsave)"
    r"|matplotlib\.(pyplot|image)\.(savefig|imsave)|numpy\.savetxt|os\.(fsync|fdatasync))$"
)
"""Functions like them, imported by their names: one of the script's own is told by its lines."""
ALSO_OF_MEMORIES = {"write", "flush"}
"""Methods that models with a memory have, too."""

LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
LOGGERS = re.compile(
    r"(log|logs|logging)$|logger|wandb|mlflow|comet|neptune|writer|tracker|board|accelerator|run$|fabric",
    re.IGNORECASE,
)
"""What one of the names before the method's is called: `log`, but not `logits`."""
PACKAGES_OF_LOGGERS = re.compile(r"logger|wandb|mlflow|comet|neptune|tensorboard|writer", re.IGNORECASE)
"""Whatever such a thing is told to do for no result, it logs; a board, a tracker or a run may do else."""
BOOKKEEPING = {
    *("update", "add", "reset", "step", "watch", "define_metric", "finish", "close", "synchronize"),
    *("append", "extend", "insert", "clear", "pop", "remove", "addHandler", "removeHandler", "init"),
    *("set", "register", "start", "stop", "join", "to", "train", "eval", "backward"),
}
"""What a logger is told to do, for no result, that writes nothing."""
NETWORK = {"requests", "httpx", "urllib", "session"}
WEIGHT_WRITERS = {"tofile", "dump", "dumps"}
"""What else may write weights that are taken out of torch."""
SAVES = {"save_pretrained", "save_checkpoint"}
"""Methods that save what they are called on, of packages: a script's own is told by what it does."""
SYNCHRONIZERS = {"synchronize", "empty_cache", "ipc_collect"}
WAITERS = {
    *("sleep", "system", "check_call", "check_output", "communicate", "flock", "lockf", "waitpid"),
    *("getoutput", "getstatusoutput"),
}
LOOKS = {"WNOHANG", "LOCK_NB"}
"""Flags with which such a call comes back at once."""
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
LOOKS_ON = {
    *(
        "exists",
        "is_file",
        "isfile",
        "is_set",
        "is_alive",
        "done",
        "ready",
        "empty",
        "full",
        "poll",
        "locked",
    ),
    *("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time_ns"),
}
"""Functions that only look what time it is, or whether another has done something."""
WAITED_FOR = {
    *("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "JoinableQueue", "Thread", "Process", "Popen"),
    *("Event", "Condition", "Semaphore", "Barrier", "Lock", "RLock"),
}
"""Classes of what such methods wait for."""

RECEIVERS = {"recv", "recvfrom", "recv_into", "recv_bytes", "recv_json", "recv_pyobj", "recv_string"}
ASKERS = {"send", "send_bytes", "send_json", "send_pyobj", "send_string"}
"""How another process is asked for what such a method waits for: it may take the CPU at once."""
ALSO_OF_MODELS = {
    *("acc", "meter", "precision", "recall", "topk", "iou", "psnr", "ssim", "dice", "jaccard", "mae"),
    *("mape", "rmse", "spearman", "kendall", "error", "errors", "calibration"),
}
"""Words of scores that functions of models and losses are called by, too."""
METRIC_WORDS = ALSO_OF_MODELS | {
    *("metric", "metrics", "accuracy", "f1", "auc", "auroc", "auprc", "bleu", "rouge", "confusion"),
    *("perplexity", "ndcg", "mrr", "wer", "cer", "kappa", "mcc", "ece"),
}
NO_SCORES = {"topk", "error", "define_metric"}
"""The largest values of a tensor are no score, and `log.error` no error of a prediction."""
LEARNING_WORDS = frozenset({"learner", "learning", "loss"})
"""Beside one of these, `metric` is what is learned."""
NO_SCHEDULES = {"sampler", "sampling", "noise", "diffusion"}
"""What else is scheduled: the noise of a diffusion, or which of its steps are trained on."""


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


def of_call(call: ast.Call, place: Place, within: Within, *, in_comprehension: bool) -> Iterator[str]:
    """Yields what one call does; in a comprehension a cast is of Python's numbers."""
    name, base = callee(call)
    owner = base.rpartition(".")[2] or base
    source = origin(call, place.aliases)
    unused = isinstance(place.statement, ast.Expr) and place.statement.value is call
    method = base not in ("", "self")  # a function of the script's own is told by its lines
    saves = (
        source in SAVERS
        or source in RENAMERS
        or name in ("copyfile", "copytree", "copy2")
        or (name in SAVES and method)
        or (name == "save_file" and ("safetensors" in base or (not base and name in place.imported)))
    )
    written = file_written(call) if unused and method and not saves else ""
    reads = (name in SYNC_METHODS and base not in ("np", "torch")) or _to_cpu(call)
    if reads and not (unused and name in ("cpu", "to")):  # `model.cpu()` moves a module
        yield SYNC
    casts = not base and name in CASTS and not in_comprehension and call.args
    if casts and may_be_tensor(call.args[0], place.imported):
        yield SYNC
    if _waits_for(call, place, name, owner) or _asks_server(call, place, name, owner):
        yield WAIT
    elif (
        name in LOG_FUNCTIONS
        or (not base and name == "urlopen")
        or (not base and IMPORTED.match(place.aliases.get(name, "")))
        or opens_to_write(call)
        or (unused and _tells_logger(name, base) and not _of_a_memory(name, owner, within))
        or (base and name in LOG_METHODS and not _of_a_memory(name, owner, within))
        or (name in LEVELS and (name != "log" or call.args or call.keywords) and _is_logger(base))
        or (base and name in LEVELS - {"log"} and call.args and _is_text(call.args[0]))
        or (source[0] in DUMPERS and name in ("dump", "dumps"))
        or (owner in NETWORK and name in ("get", "post", "put", "request"))
        or writes_table(call, name, place.queries)
        or (written and written not in STATE_FILES)
    ):
        yield SAVE if _saves(call, place, name) else LOG
    if name in SYNCHRONIZERS:
        yield SYNCHRONIZE
    if source == ("gc", "collect"):
        yield COLLECT
    waits = name in WAITERS or source in (("subprocess", "run"), ("subprocess", "call"))
    if waits and not names_in(call) & LOOKS:
        yield WAIT
    if saves or written in STATE_FILES:
        yield SAVE
    foreach = keyword_of(call, "foreach")
    by_one = isinstance(foreach, ast.Constant) and foreach.value is False
    if clips_one(call, place) or (name.startswith("clip_grad") and by_one):
        yield CLIP
    averages = words(name) & {"update", "step"} and "ema" in words(name) | words(owner)
    if (name == "update_parameters" and len(call.args) + len(call.keywords) == 1) or (
        averages and not within.model
    ):
        yield EMA
        if name == "update_parameters" and owner in place.at_once:
            yield WHOLE
    if _steps_schedule(name, base, owner):
        yield SCHEDULE
    of_owner = name in ("update", "compute", "add") and not _is_logger(base)
    called = words(name) | (words(owner) if of_owner else set())
    if name.endswith("Error") or "matmul" in called:
        called -= {"error", "precision"}  # an exception, or that of all products
    scores = METRIC_WORDS - ALSO_OF_MODELS if within.loss else METRIC_WORDS
    if called & scores and name not in NO_SCORES and not called & LEARNING_WORDS:
        yield METRIC


def _saves(call: ast.Call, place: Place, name: str) -> bool:
    """Whether a call that writes writes state: to a file of it, or weights by hand."""
    if name in WRITERS and _of_saved(call, place):
        return True
    if name not in WRITERS | WEIGHT_WRITERS or (name == "dumps" and not _is_written(place)):
        return False  # what is sent to another process is no checkpoint
    given = call.args[0] if call.args else None
    if isinstance(given, ast.Name) and given.id in place.saved & place.texts:
        return True
    return copies_weights(call, sources(place, nodes_of(place.statement)))


def _is_written(place: Place) -> bool:
    """Whether what a statement makes is written to a file, there or later."""
    made = writes(place.statement)
    return bool(called_in(place.statement) & WRITERS) or (bool(made) and made <= place.texts)


def _of_saved(call: ast.Call, place: Place) -> bool:
    """Whether a call is of a file that state is saved to, or of what will be written to one."""
    made = {name.rpartition(".")[2] for name in writes(place.statement)}
    return bool((names_in(call) | made) & place.saved)


def _may_block(call: ast.Call) -> bool:
    """Whether a `get` says that it waits, as a queue's does: a mapping's is given a key."""
    first = call.args[0] if call.args else None
    says = isinstance(first, ast.Constant) and first.value is True
    return says or any(keyword.arg in ("block", "timeout") for keyword in call.keywords)


def _waits_for(call: ast.Call, place: Place, name: str, owner: str) -> bool:
    """Whether a call waits for another process or thread, but a rank: `p.stdout.readline()`."""
    if name in RECEIVERS:
        return owner not in ("dist", "distributed")
    if name in ASKERS:
        return owner not in ("dist", "distributed") and _is_answered(call, place)
    if name == "join" and owner and not call.args:
        return True  # neither a text nor a path is joined of nothing
    if name == "get" and owner and owner not in NETWORK and _may_block(call):
        return True
    if name in JOINS:
        waits = owner in place.waited_for or words(owner) & JOINS[name]
        return bool(waits) or (name == "wait" and bool(call.args))
    if name in LOG_FUNCTIONS:
        file = keyword_of(call, "file")
        return isinstance(file, ast.Attribute) and file.attr == "stdin"
    return owner == "stdin" or (owner == "stdout" and name.startswith("read"))


def _is_answered(call: ast.Call, place: Place) -> bool:
    """Whether the same function receives from what a call sends to: `pipe.send(x); return pipe.recv()`."""
    asked = callee(call)[1]
    inside = statements_of(place.function) if place.function is not None else ()
    receives = (each for statement in inside for each in calls_of(statement))
    return any(is_call(each, RECEIVERS) and callee(each)[1] == asked for each in receives)


def spins(loop: ast.stmt | None, place: Place) -> bool:
    """Whether a loop does nothing but look whether it may go on: `while time.monotonic() < due: pass`."""
    if not isinstance(loop, ast.While) or not all(_idles(each) for each in loop.body):
        return False
    calls = [node for node in ast.walk(loop.test) if isinstance(node, ast.Call)]
    looks = [is_call(each, LOOKS_ON) or origin(each, place.aliases) == ("time", "time") for each in calls]
    return bool(looks) and all(looks)


def _idles(statement: ast.stmt) -> bool:
    sleeps = isinstance(statement, ast.Expr) and is_call(statement.value, WAITERS)
    return sleeps or isinstance(statement, (ast.Pass, ast.Continue))


def _asks_server(call: ast.Call, place: Place, name: str, owner: str) -> bool:
    """Whether a call waits for the answer of a server, which is then used: `requests.get(url).json()`. What
    is only told to one is logging."""
    if name == "urlopen":
        given = call.args[0] if len(call.args) == 1 else None
        if given is None or words_of(names_in(given)) & {"request", "req"} or keyword_of(call, "data"):
            return False  # it may be posted
    elif owner not in NETWORK or name != "get":
        return False
    statement = place.statement
    if not isinstance(statement, (ast.With, ast.AsyncWith)):
        return not isinstance(statement, ast.Expr) and not _is_only_checked(call, place)
    answers = writes(statement)
    inside = (each for inner in statement.body for each in statements_in(inner))
    return any(reads(each) & answers for each in inside if not isinstance(each, ast.Expr))


def _is_only_checked(call: ast.Call, place: Place) -> bool:
    """Whether the answer to a call is given a name and at most asked whether all is well, or told of."""
    statement, around = place.statement, place.function or (place.loops[-1] if place.loops else None)
    if not isinstance(statement, ast.Assign) or statement.value is not call or around is None:
        return False
    answers = writes(statement)
    if not all(name.isidentifier() for name in answers):
        return False  # it is kept for others
    reading = [each for each in statements_in(around) if reads(each) & answers]
    return all(_checks(each, answers) for each in reading if each is not statement)


def _checks(statement: ast.stmt, answers: set[str]) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        name, base = callee(statement.value)
        told = name in LEVELS | LOG_METHODS and _is_logger(base)
        return base in answers or (not base and name in LOG_FUNCTIONS) or told
    if not isinstance(statement, (ast.If, ast.Assert)):
        return isinstance(statement, ast.Raise)
    asked = {
        node.attr
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Attribute) and last_name(node.value) in answers
    }
    steers = any(isinstance(node, (ast.Break, ast.Continue)) for node in ast.walk(statement))
    return bool(asked) and asked <= {"ok", "status_code"} and not steers


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is a text that is written out there."""
    return isinstance(node, ast.JoinedStr) or text_of(node) is not None


def _is_logger(base: str) -> bool:
    return any(LOGGERS.search(part) for part in re.findall(r"\w+", base))


def _tells_logger(name: str, base: str) -> bool:
    """Whether a method whose result is not used is a logger's, and no bookkeeping: `logger.logkv(k, v)`."""
    owner = re.findall(r"\w+", base.removesuffix(".experiment"))[-1:]
    first = re.split(r"_|(?<=[a-z])(?=[A-Z])", name)[0]
    if not owner or name in BOOKKEEPING or first in ("update", "reset", "synchronize", "set"):
        return False
    return bool(PACKAGES_OF_LOGGERS.search(owner[0]))


def _steps_schedule(name: str, base: str, owner: str) -> bool:
    """Whether a call steps a learning-rate schedule: `scheduler.step()`, `self.sched.update_lr()`."""
    if "sched" not in base.lower() or words(owner) & NO_SCHEDULES:
        return False
    if name == "update":  # `schedule.update(...)` may be a dictionary's
        return bool(words(owner) & {"sched", "scheduler", "schedulers"})
    return name.startswith(("step", "update_"))


def _of_a_memory(name: str, owner: str, within: Within) -> bool:
    """Whether `memory.write(key, value)` is a part of a model: nothing says that this is a file."""
    return within.model and name in ALSO_OF_MEMORIES and not words(owner) & FILES


def only_reads(nodes: Sequence[ast.AST], *, of_each: bool) -> bool:
    """Whether bringing values to Python is all that a statement does.

    Args:
        of_each: The statement does so for each of many things. Then to find out whether a tensor is finite
            takes longer than to read the answer.
    """
    cheap = SYNC_METHODS | CASTS | CHEAP | (set() if of_each else PREDICATES)
    return all(is_call(node, cheap) or _to_cpu(node) for node in nodes if isinstance(node, ast.Call))


def _to_cpu(call: ast.Call) -> bool:
    return is_call(call, {"to"}) and any(text_of(value) == "cpu" for value in given_to(call))
