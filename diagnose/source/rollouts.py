"""Which statements step the environment of a reinforcement learner, and which loops act in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from diagnose.source.calling import called_in, callee, calls_of, given_to, is_call
from diagnose.source.kinds import ForLoop, Function, Loop
from diagnose.source.names import last_name, names_in, words, words_of
from diagnose.source.place import Place, innermost
from diagnose.source.reads_writes import reads, reads_in, writes
from diagnose.source.statements import nodes_of, statements_in

ENVIRONMENTS = {
    *("env", "envs", "venv", "environment", "environments", "game", "gym", "sim", "simulator", "world"),
}
"""Words of what an environment is called."""

TALKS = {"recv", "send"}
"""What is told to who talks to an environment, and to other processes: of these the `world` is all."""

ADVANCES = {"step", "reset", "step_wait", *TALKS}

PERFORMS = {"act", "play", "move", "push", "advance", "perform"}
"""What else an environment that is called one is told to do."""

LEARNT = {
    *("model", "net", "network", "policy", "actor", "critic", "agent"),
    *("models", "nets", "networks", "policies", "actors", "critics", "agents"),
}
"""Words of what was learned, or is: a simulation that asks it may be imagined."""

STORES = {
    *("buffer", "memory", "pool", "replay", "history", "storage", "queue"),
    *("buffers", "memories", "pools", "replays", "histories", "storages", "queues"),
}
"""Words of what keeps experience, and is told `push`."""

CHOSEN = {"action", "actions", "move", "moves"}
"""Words of what a policy has chosen."""

TRAINING_WORDS = {"train", "training", "trainer", "fit", "epoch"}
"""In the name of a package's function that the time is in: it is the training's, whatever else the line
does. `print(trainer.train())` is no logging."""

EVALUATES = {"eval", "evaluate", "evaluation", "evaluator", "test", "val", "validate", "validation"}
"""Words of functions and environments that measure what was learned."""

PLAYS = {"selfplay", "mcts", "playout", "playouts", "episode", "episodes"}
"""Words of functions in which a model without gradients makes what it then learns from."""

LEARNS = {"backward", "learn", "train", "update", "optimize", "fit"}
"""Words of functions that learn from what was collected."""

LEARNERS = {
    *("opt", "optim", "optimizer", "scheduler", "scaler", "trainer", "learner"),
    *("opts", "optims", "optimizers", "schedulers", "scalers", "trainers", "learners"),
}
"""Words of what else is stepped."""

MEASURERS = {"runner", "evaluator", "tester"}
"""Words of what measures it."""

REWARDS = {"reward", "rewards", "rew"}
"""Nothing but an environment answers with one."""

ACTS = {"act", "acts", "action", "actions", "policy"}
"""Words of functions that choose what an environment is then told to do."""

LEAST_RESULTS = 3
ANSWERS = {*REWARDS, "done", "dones", "terminated", "truncated", "terminations", "terminal"}
"""An environment's step returns an observation and a reward, and mostly an end. That of a trainer may
return as many results, but of other names."""

ENVIRONMENT_PACKAGES = re.compile(
    r"^(gymnasium|gym|pettingzoo|ale_py|dm_control|dm_env|minigrid|procgen|vizdoom|envpool"
    r"|stable_baselines3/common/(vec_env|monitor|envs|atari_wrappers))\b"
)
LEARNER_PACKAGES = re.compile(r"^(stable_baselines3|sb3_contrib|tianshou|torchrl|skrl|rl_games|rsl_rl)/")
"""What such a package computes without gradients is how its learner acts, or is told how well it does."""


def measures(functions: Iterable[str]) -> bool:
    """Whether one of the functions that called each other measures what was learned, by its name."""
    called = (words(function.rpartition(".")[2]) for function in functions)
    return any(name & EVALUATES and not name & TRAINING_WORDS for name in called)


def plays(name: frozenset[str]) -> bool:
    """Whether a function of these words lets a model play, for it to learn from that."""
    return bool(name & PLAYS) or name >= {"self", "play"}


def steps_environment(
    statement: ast.stmt, loops: Iterable[Loop] = (), simulators: Collection[str] = ()
) -> bool:
    """Whether a statement steps an environment, or resets it, in order to learn from that.

    It is told by what the environment is called, or by what is taken of its step: `obs, reward, done`. One
    without an object is told by both: `state, reward, done = env_step(state, action)`.

    Args:
        loops: Those around the statement. What a loop's variable is of is told by what the loop goes over.
        simulators: Functions of the script that may be such a step; see `simulators_of`.
    """
    if _simulates(statement, simulators):
        return True
    turns = turns_of(statement, loops)
    for call in calls_of(statement):
        name, base = callee(call)
        of_base = words(base)
        if of_base & EVALUATES or not base or name not in ADVANCES or _imagines(base):
            continue
        of_turn = words(_name_of_all(turns[base])) if base in turns else frozenset()
        if of_turn & EVALUATES:
            continue
        called = (of_base | of_turn) & ENVIRONMENTS - ({"world"} if name in TALKS else set())
        if called and not (of_base | of_turn) & LEARNERS:
            return True
        if not isinstance(statement, ast.Assign):
            continue
        # `zip(*[pipe.recv() for pipe in pipes])` gives what all of them answered.
        if name == "recv" or (name == "step" and statement.value is call and call.args):
            return _answers(statement.targets[0])
    return False


def _simulates(statement: ast.stmt, simulators: Collection[str]) -> bool:
    """Whether a statement asks a function what follows on a state and an action: it answers with a reward,
    or is given what is called an action and answers whether that was the end."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    (target, *_), call = statement.targets, statement.value
    given = given_to(call)
    if callee(call)[1] or callee(call)[0] not in simulators or len(given) < 2 or not _answers(target):
        return False
    told = words_of(names_in(*given))
    return not told & LEARNT and bool(told & CHOSEN or words_of(names_in(target)) & REWARDS)


def _kind(base: str) -> str:
    """Returns the word that says what something is by its name, the last: `model` of `self.world_model`, or
    `models` of `world_models[k]`."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", _last_part(base))
    return found[-1].lower() if found else ""


def _last_part(base: str) -> str:
    """Returns the last name of an expression without its index: `envs` of `self.envs[k]`, but
    `env_model` of `nets["env_model"]`."""
    base = re.sub(r"\[(['\"])(\w+)\1\]", r".\2", base)
    while base != (bare := re.sub(r"\[[^][]*\]", "", base)):
        base = bare
    return base.rpartition(".")[2]


def _imagines(base: str) -> bool:
    """Whether what is called an environment is a model of one: `world_model`."""
    return _kind(base) in LEARNT and bool(words(_last_part(base)) & ENVIRONMENTS)


def turns_of(statement: ast.stmt, loops: Iterable[Loop]) -> dict[str, ast.expr]:
    """Returns what the variables of loops around and in a statement are taken from, turn by turn."""
    found: dict[str, ast.expr] = {}
    for turning in (*loops, *nodes_of(statement)):
        if isinstance(turning, (ForLoop, ast.comprehension)):
            found.update(_taken(turning.target, turning.iter))
    return found


def _taken(target: ast.expr, source: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yields each variable of a loop with what it is one of: with `zip(envs, plan)` each with its own."""
    if isinstance(target, ast.Name):
        yield target.id, source
    elif isinstance(target, ast.Tuple) and isinstance(source, ast.Call):
        name = last_name(source.func)
        if name == "zip" and len(source.args) == len(target.elts):
            for each, of in zip(target.elts, source.args, strict=True):
                yield from _taken(each, of)
        elif name == "enumerate" and source.args and len(target.elts) == 2:
            yield from _taken(target.elts[1], source.args[0])
        elif name == "items" and isinstance(source.func, ast.Attribute) and len(target.elts) == 2:
            yield from _taken(target.elts[1], source.func.value)


def _name_of_all(source: ast.expr) -> str:
    """Returns what those are called that are gone over, `envs` of `list(self.envs)`; empty if not known."""
    if isinstance(source, ast.Call):
        if is_call(source, ("list", "tuple", "reversed", "sorted", "tqdm")) and source.args:
            return _name_of_all(source.args[0])
        if is_call(source, {"values"}) and isinstance(source.func, ast.Attribute):
            return _name_of_all(source.func.value)
        return ""
    return _name_of_all(source.value) if isinstance(source, ast.Subscript) else last_name(source)


CHOOSES = {"sample", "argmax", "multinomial", "item", "tolist", "numpy"}
"""Names in a statement that makes an action of what a policy computed."""

DRAWS = {*CHOOSES, "bernoulli"}
"""Names in a statement that makes one which no gradient passes through."""


def told_to_step(statement: ast.stmt) -> Iterator[tuple[str, set[str]]]:
    """Yields what a statement steps, other than what learns, and the names that it is given."""
    for call in calls_of(statement):
        name, base = callee(call)
        if name == "step" and base and call.args and not words(base) & (EVALUATES | LEARNERS):
            yield base, reads_in(*call.args)


def takes_action(statement: ast.stmt, function: Function | None, loops: Iterable[Loop] = ()) -> bool:
    """Whether a statement steps something with what a policy has chosen in the same function, whatever it
    is called and gives back: `depot.step(plan)` after `plan = self.act(seen)`. What is called a game
    or an environment may be told in other words: `game.play(move)`; not what keeps or imagines its
    answers, `env_pool.push(state, move)`, `world_model.advance(state, move)`."""
    turns = turns_of(statement, loops)
    given = {
        name
        for called, base, args in ((*callee(call), call.args) for call in calls_of(statement))
        if base and (called == "step" or (called in PERFORMS and words(base) & ENVIRONMENTS))
        if not (_imagines(base) or (called == "push" and _kind(base) in STORES))
        if not words(base) & (EVALUATES | LEARNERS)
        if base not in turns or not words(_name_of_all(turns[base])) & LEARNERS
        for name in names_in(*args)
    }
    given |= names_in(*(turns[turn] for turn in given & turns.keys()))
    if not given or function is None:
        return False
    return any(
        writes(each) & given and any(_acts(words(name)) for name in called_in(each))
        for each in statements_in(function)
    )


def _acts(name: frozenset[str]) -> bool:
    return bool(name & ACTS) and not name & {"loss", "gradient", "gradients"}


def judges_action(statement: ast.stmt) -> bool:
    """Whether a statement has a model judge what it has chosen: `value = agent.evaluate(obs, action)`. What
    is told so by a trainer, or is no method, measures what was learned."""
    return any(
        words(name) & EVALUATES
        and base
        and not words(base) & (LEARNERS | MEASURERS)
        and words_of(names_in(*given_to(call))) & CHOSEN
        for call in calls_of(statement)
        for name, base in (callee(call),)
    )


def collects(place: Place) -> bool:
    """Whether a statement serves to collect experience: it acts, in a loop that steps an environment.

    Where that loop learns, too, only what the environment's next step depends on is for it.
    """
    if not place.loops:
        return False
    inside = statements_in(place.loops[0])
    loops = [*place.loops, *(each for each in inside if isinstance(each, Loop))]
    steps = [
        each
        for each in inside
        if steps_environment(each, loops, place.simulators) or takes_action(each, place.function, loops)
    ]
    if not steps or not any(words_of(called_in(each)) & LEARNS for each in inside):
        return bool(steps)
    wanted: set[str] = set()
    pending = steps
    while pending:
        wanted.update(*(reads(statement) for statement in pending))
        inside = [statement for statement in inside if statement not in pending]
        pending = [statement for statement in inside if writes(statement) & wanted]
    return bool(writes(place.statement) & wanted)


def is_environments(function: Function | None) -> bool:
    """Whether a function is the `step` of an environment: it returns what such a step does."""
    if function is None or isinstance(function, ast.Lambda) or function.name not in ("step", "_step"):
        return False
    returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return any(_answers(value) for value in returned if value is not None)


def _answers(results: ast.expr) -> bool:
    """Whether a tuple is what an environment answers: an observation, a reward, an end, perhaps more."""
    if not isinstance(results, ast.Tuple) or len(results.elts) < 2:
        return False
    told = words_of(names_in(results))
    return bool(told & REWARDS) or (len(results.elts) >= LEAST_RESULTS and bool(told & ANSWERS))


class Acting(NamedTuple):
    """What a line has to do with an environment.

    Attributes:
        steps: Whether it steps one.
        simulates: Whether it does only if a function is one: a simulation. A loss may be made through it.
        within: Whether it is a line of an environment's own step, which each step gets to.
        acts: Whether it serves to act in one.
        judges: Whether it judges what was chosen there.
    """

    steps: bool
    simulates: bool
    within: bool
    acts: bool
    judges: bool


def acting_of(places: Sequence[Place]) -> Acting:
    """Returns what the statements of a line have to do with an environment."""
    place = innermost(places)
    own = [each for each in places if is_environments(each.function)]
    surely = bool(own) or any(
        steps_environment(each.statement, each.loops)
        or takes_action(each.statement, each.function, each.loops)
        for each in places
    )
    simulates = not surely and any(_simulates(each.statement, each.simulators) for each in places)
    return Acting(
        steps=surely or simulates,
        simulates=simulates,
        within=any(each.every is None for each in own),
        acts=place is not None and collects(place),
        judges=place is not None and judges_action(place.statement),
    )
