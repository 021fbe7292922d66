"""Which phase the time between two hooks belongs to, from the source line that was sampled there."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from diagnose.core.ledger import SLOT_OF
from diagnose.core.phases import Phase
from diagnose.source.blocks import Blocks
from diagnose.source.purposes import ENVIRONMENT, ROLLOUT
from diagnose.source.roles import Roles
from diagnose.source.sites import anchors_of
from diagnose.source.sources import Sources

CHECKOUT = Path(__file__).parents[1]
FILE = "/home/u/train.py"
AFTER_DATA_WAIT = SLOT_OF["gap_after_data_wait"]
AFTER_FORWARD = SLOT_OF["gap_after_forward"]
AFTER_BACKWARD = SLOT_OF["gap_after_backward"]
AFTER_OPTIMIZER = SLOT_OF["gap_after_optimizer"]


class Script:
    """A script and the lines in it from which hooks were entered.

    Args:
        source: Its text. Lines are named by a part of them that no other line has.
        sites: The part of a line, and the kind of what it calls.
        inside: Stacks that were sampled inside a model call or a backward: the slot, then parts of lines,
            innermost first.
    """

    def __init__(
        self, source: str, sites: Iterable[tuple[str, str]], inside: Iterable[tuple[str, ...]] = ()
    ) -> None:
        self.lines = dedent(source).splitlines()
        self.roles = Roles(
            [(kind, FILE, self.line(part), "f", 1) for part, kind in sites],
            Sources({FILE: dedent(source)}),
            [(0, SLOT_OF[slot], [("", 0, ""), *self.stack(*parts)], 1) for slot, *parts in inside],
        )

    def line(self, part: str) -> int:
        (number,) = (n for n, text in enumerate(self.lines, 1) if part in text)
        return number

    def stack(self, *parts: str) -> list[tuple[str, int, str]]:
        return [(FILE, self.line(part), self.function(self.line(part))) for part in parts]

    def function(self, number: int) -> str:
        """The name of the function that a line is in."""
        depth = indent(self.lines[number - 1])
        around = (text for text in reversed(self.lines[: number - 1]) if indent(text) < depth)
        return next((text.split()[1].split("(")[0] for text in around if "def " in text), "<module>")

    def phase(self, *parts: str, slot: int) -> Phase:
        return self.roles.phase(self.stack(*parts), slot)


def indent(text: str) -> int:
    return len(text) - len(text.lstrip()) if text else 99


PLAIN = Script(
    """
    def get_batch():
        return read()

    def loss_of(out, y):
        return cross_entropy(out, y)

    for step in range(100):
        index = choose(step)
        x, y = get_batch(index)
        out, h = model(x, h)
        h = h.detach()
        logged = summary(out)
        loss = loss_of(out, y)
        loss = loss / 4
        loss.backward()
        optimizer.step()
        log.write(logged)
    """,
    [("model(x", "forward"), ("loss.backward", "backward"), ("optimizer.step", "optimizer")],
)


def test_what_the_models_arguments_are_made_of_is_waiting_for_data():
    assert PLAIN.phase("x, y = get_batch", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT
    assert PLAIN.phase("index = choose", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT


def test_what_backward_is_called_on_is_computed_in_the_forward_pass():
    assert PLAIN.phase("loss = loss_of", slot=AFTER_FORWARD) is Phase.FORWARD
    assert PLAIN.phase("loss = loss / 4", slot=AFTER_FORWARD) is Phase.FORWARD


def test_a_function_serves_the_statement_that_calls_it():
    assert PLAIN.phase("return read()", "x, y = get_batch", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT
    assert PLAIN.phase("return cross_entropy", "loss = loss_of", slot=AFTER_FORWARD) is Phase.FORWARD


@pytest.mark.parametrize("line", ["logged = summary", "h = h.detach", "log.write"])
def test_what_feeds_neither_is_other(line):
    assert PLAIN.phase(line, slot=AFTER_FORWARD) is Phase.OTHER


def test_code_outside_the_training_function_is_other():
    assert PLAIN.phase("return read()", slot=AFTER_OPTIMIZER) is Phase.OTHER
    assert PLAIN.roles.phase([], AFTER_OPTIMIZER) is Phase.OTHER
    assert PLAIN.roles.phase([("/home/u/other.py", 9, "f")], AFTER_OPTIMIZER) is Phase.OTHER


def test_the_time_around_a_call_belongs_to_it():
    # A hook opens a little after its line begins, and closes a little before the line ends.
    assert PLAIN.phase("model(x", slot=AFTER_DATA_WAIT) is Phase.FORWARD
    assert PLAIN.phase("loss.backward", slot=AFTER_BACKWARD) is Phase.BACKWARD
    assert PLAIN.phase("optimizer.step", slot=AFTER_BACKWARD) is Phase.OPTIMIZER


def test_the_next_batch_made_between_forward_and_backward_is_waiting_for_data():
    script = Script(
        """
        x, y = get_batch()
        while True:
            loss = criterion(model(x), y)
            x, y = fetch()
            loss.backward()
        """,
        [("model(x", "forward"), ("loss.backward", "backward")],
    )
    assert script.phase("x, y = fetch", slot=AFTER_FORWARD) is Phase.DATA_WAIT


def test_a_loss_on_the_line_of_the_model_call_is_forward():
    script = Script(
        """
        for x, y in loader:
            loss = my_loss(
                model(x),
                y,
            )
            loss.backward()
        """,
        [("in loader", "next"), ("model(x", "forward"), ("loss.backward", "backward")],
    )
    for part in ("loss = my_loss", "model(x", "    y,"):
        assert script.phase(part, slot=AFTER_FORWARD) is Phase.FORWARD
    assert script.phase("in loader", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT


def test_a_loss_on_the_line_of_its_backward_is_forward():
    script = Script(
        """
        for x, y in batches:
            cross_entropy(model(x), y).backward()
        """,
        [("model(x", "forward"), ("model(x", "backward")],
    )
    assert script.phase("model(x", slot=AFTER_FORWARD) is Phase.FORWARD


def test_a_batch_made_in_the_models_own_argument_is_waiting_for_data():
    script = Script(
        """
        def get_batch():
            return read()

        while True:
            out = model(get_batch())
            out.sum().backward()
        """,
        [("model(get", "forward"), ("backward", "backward")],
    )
    assert script.phase("return read()", "model(get", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT


def test_a_line_that_leaves_everything_to_a_trainer_says_nothing():
    kinds = ("next", "forward", "backward", "optimizer")
    script = Script("trainer.train()", [("trainer.train", kind) for kind in kinds])
    for slot in (AFTER_DATA_WAIT, AFTER_FORWARD, AFTER_BACKWARD, AFTER_OPTIMIZER):
        assert script.phase("trainer.train", slot=slot) is Phase.OTHER


RETURNED = """
    def training_step(batch):
        x, y = unpack(batch)
        out = model(x)
        self.log(out)
        loss = cross_entropy(out, y)
        return scale * loss
"""


def test_a_loss_that_is_returned_to_a_trainer_is_forward():
    script = Script(RETURNED, [("model(x", "forward")])
    assert script.phase("loss = cross", slot=AFTER_FORWARD) is Phase.FORWARD
    assert script.phase("return scale", slot=AFTER_FORWARD) is Phase.FORWARD
    assert script.phase("self.log", slot=AFTER_FORWARD) is Phase.OTHER
    assert script.phase("x, y = unpack", slot=AFTER_DATA_WAIT) is Phase.DATA_WAIT


IN_A_FUNCTION = """
    class Net:
        def forward(self, x):
            return dense(x)

    def train_step(a, b):
        note(a)
        loss = criterion(net(a), b)
        loss.backward()

    def get_batch():
        return read()

    def train():
        for step in range(100):
            x, y = get_batch()
            train_step(x, y)
            report(step)
"""
SITES = [("net(a)", "forward"), ("loss.backward", "backward")]


def test_a_loop_that_leaves_the_step_to_a_function_waits_for_its_batch():
    script = Script(IN_A_FUNCTION, SITES, [("forward", "return dense", "net(a)", "train_step(x, y)")])
    assert script.phase("return read()", "x, y = get_batch", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT
    assert script.phase("x, y = get_batch", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT
    assert script.phase("report(step)", slot=AFTER_OPTIMIZER) is Phase.OTHER
    assert script.phase("note(a)", "train_step(x, y)", slot=AFTER_OPTIMIZER) is Phase.OTHER


def test_what_a_function_with_the_model_is_given_on_the_line_of_its_call_is_the_batch():
    text = IN_A_FUNCTION.replace("x, y = get_batch()", "").replace("(x, y)", "(*get_batch())")
    seen = [("forward", "return dense", "net(a)", "train_step(*get_batch())")]
    script = Script(text, SITES, seen)
    line = "train_step(*get_batch())"
    assert script.phase("return read()", line, slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT
    assert script.phase("note(a)", line, slot=AFTER_OPTIMIZER) is Phase.OTHER


def test_nothing_is_guessed_of_a_caller_that_was_never_seen():
    script = Script(IN_A_FUNCTION, SITES)
    assert script.phase("x, y = get_batch", slot=AFTER_OPTIMIZER) is Phase.OTHER


def test_a_file_that_cannot_be_read_has_no_roles():
    sites = [("forward", "/nowhere/train.py", 3, "f", 1), ("backward", "/nowhere/train.py", 4, "f", 1)]
    roles = Roles(sites, Sources())
    assert roles.phase([("/nowhere/train.py", 3, "f")], AFTER_FORWARD) is Phase.OTHER
    assert (
        Roles(sites, Sources({"/nowhere/train.py": "print 'two'"})).phase([], AFTER_FORWARD) is Phase.OTHER
    )


APPENDED = Script(
    """
    for step in range(100):
        losses = []
        for x in rows:
            out = model(x)
            losses.append(loss_of(out))
            history.append(len(out))
        loss = sum(losses)
        loss.backward()
        optimizer.step()
    """,
    [("model(x", "forward"), ("loss.backward", "backward"), ("optimizer.step", "optimizer")],
)


def test_what_is_put_into_the_list_that_the_loss_is_made_of_is_computed_in_the_forward_pass():
    assert APPENDED.phase("losses.append", slot=AFTER_FORWARD) is Phase.FORWARD
    assert APPENDED.phase("history.append", slot=AFTER_FORWARD) is Phase.OTHER


OWN_METHOD = Script(
    """
    class Flow(Module):
        def features(self, x):
            return tanh(x @ self.weight)

        def loss(self, x, y):
            h = self.features(x)
            return mse(self.out(h), y)

    for step in range(100):
        rows = randint(0, 2048, (512,))
        loss = model.loss(X[rows], Y[rows])
        loss.backward()
        optimizer.step()
    """,
    [("mse(self.out(h)", "further"), ("loss.backward", "backward"), ("optimizer.step", "optimizer")],
    inside=[("forward", "mse(self.out(h)", "loss = model.loss")],
)


def test_what_a_model_that_is_not_called_as_a_module_computes_is_forward():
    after = {"slot": AFTER_OPTIMIZER}
    assert (
        OWN_METHOD.phase("return tanh", "h = self.features", "loss = model.loss", **after) is Phase.FORWARD
    )
    assert OWN_METHOD.phase("h = self.features", "loss = model.loss", **after) is Phase.FORWARD
    assert OWN_METHOD.phase("rows = randint", **after) is Phase.DATA_WAIT


WITHOUT_A_MODULE = Script(
    """
    def batches(jets):
        while True:
            mixed = overlay(jets)
            for rows in randperm(len(jets)).split(64):
                yield mixed[rows], kinds[rows]

    def classify(params, x):
        return x @ params["weight"]

    def train(params):
        feed = batches(jets)
        for step, (x, kind) in enumerate(islice(feed, 200), 1):
            seen = (x - 0.5).clamp(-1, 1)
            loss = cross_entropy(classify(params, seen), kind)
            loss.backward()
            optimizer.step()
    """,
    [("loss.backward", "backward"), ("optimizer.step", "optimizer")],
)


def test_what_a_loop_without_a_model_goes_over_is_waiting_for_data_and_what_it_computes_of_it_forward():
    after = {"slot": AFTER_OPTIMIZER}
    assert WITHOUT_A_MODULE.phase("mixed = overlay", "in enumerate(", **after) is Phase.DATA_WAIT
    assert WITHOUT_A_MODULE.phase("seen =", **after) is Phase.DATA_WAIT
    assert WITHOUT_A_MODULE.phase("return x @", "loss = cross", **after) is Phase.FORWARD
    assert WITHOUT_A_MODULE.phase("loss = cross", **after) is Phase.FORWARD


WITH_A_LOSS_MODULE = Script(
    """
    for x, y in loader:
        x = normalize(x)
        out = model(x)
        logits = out.flatten(0, 1)
        y = smooth(y)
        loss = criterion(logits, y)
        loss.backward()
    """,
    [("= model(x)", "forward"), ("criterion", "further"), ("loss.backward", "backward")],
)


def test_what_a_loss_module_gets_is_forward_if_the_model_computed_it_else_a_part_of_the_batch():
    assert WITH_A_LOSS_MODULE.phase("logits = out", slot=AFTER_FORWARD) is Phase.FORWARD
    assert WITH_A_LOSS_MODULE.phase("y = smooth", slot=AFTER_FORWARD) is Phase.DATA_WAIT
    assert WITH_A_LOSS_MODULE.phase("x = normalize", slot=AFTER_DATA_WAIT) is Phase.DATA_WAIT


WITH_A_FUNCTION_AS_LOSS = Script(
    """
    for labels in batches:
        for t in reversed(range(16)):
            returns[t] = labels[t] + discount * returns[t + 1]
        smooth = build_targets(labels)
        out = model(x)
        self.half = out / 2
        logits = out.flatten(0, 1)
        penalty = 0
        for p in model.parameters():
            penalty = penalty + p.abs().sum()
        loss = cross_entropy(logits, smooth, returns) + penalty + weigh(self.half)
        loss.backward()
    """,
    [("= model(x)", "forward"), ("loss.backward", "backward")],
)


def test_what_a_functional_loss_gets_is_forward_if_the_model_computed_it_else_a_part_of_the_batch():
    for part in ("smooth = build", "for t in", "returns[t] ="):
        assert WITH_A_FUNCTION_AS_LOSS.phase(part, slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT
    for part in ("logits = out", "self.half = out", "for p in", "penalty = penalty", "loss = cross"):
        assert WITH_A_FUNCTION_AS_LOSS.phase(part, slot=AFTER_FORWARD) is Phase.FORWARD


BALANCED = Script(
    """
    class Balance:
        @property
        def weights(self):
            return inverse(self.records)

    def soft(truth):
        return blur(truth)

    def loss_of(out, truth, weights):
        return cross_entropy(out, truth, weights)

    balance = Balance(rows)
    def penalty(model):
        return decay(model)

    for picture, truth in loader:
        loss = loss_of(model(picture), soft(truth), balance.weights) + penalty(model)
        loss.backward()
    """,
    [("for picture", "next"), ("loss = loss_of", "forward"), ("loss.backward", "backward")],
)


def test_what_the_line_of_the_model_calls_besides_is_the_batchs_or_the_loops():
    def phase(part: str, function: str) -> Phase:
        inner = (FILE, BALANCED.line(part), function)
        return BALANCED.roles.phase([inner, *BALANCED.stack("loss = loss_of")], AFTER_FORWARD)

    assert phase("return cross_entropy", "loss_of") is Phase.FORWARD
    assert phase("return decay", "penalty") is Phase.FORWARD
    assert phase("return blur", "soft") is Phase.DATA_WAIT
    assert phase("return inverse", "Balance.weights") is Phase.OTHER


ACTOR = Script(
    """
    def choose(state):
        probabilities = policy(state)
        chances = Categorical(probabilities)
        action = chances.sample()
        policy.saved.append(chances.log_prob(action))
        policy.entropies.append(chances.entropy().item())
        return action.item()
    """,
    [("policy(state)", "forward")],
)


def test_what_is_put_aside_for_a_loss_elsewhere_is_computed_in_the_forward_pass():
    assert ACTOR.phase("policy.saved", slot=AFTER_FORWARD) is Phase.FORWARD
    assert ACTOR.phase("chances = ", slot=AFTER_FORWARD) is Phase.FORWARD
    assert ACTOR.phase("policy.entropies", slot=AFTER_FORWARD) is Phase.OTHER


ACTOR_AND_CRITIC = Script(
    """
    class Agent(Module):
        def get_action_and_value(self, x, action=None):
            x = normalize(x)
            logits = self.actor(x)
            probs = Categorical(logits=logits)
            if action is None:
                action = probs.sample()
            return action, probs.log_prob(action), probs.entropy(), self.critic(x)
    """,
    [("self.actor(x)", "forward"), ("self.critic(x)", "forward")],
)


def test_what_is_returned_beside_a_call_is_no_part_of_its_batch_if_another_model_computed_it():
    assert ACTOR_AND_CRITIC.phase("probs = ", slot=AFTER_FORWARD) is Phase.FORWARD
    assert ACTOR_AND_CRITIC.phase("action = probs", slot=AFTER_FORWARD) is Phase.FORWARD
    assert ACTOR_AND_CRITIC.phase("x = normalize", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT


CLOSED_OVER = Script(
    """
    def train_one_epoch():
        for picture, truth in read():
            picture = blur(picture)
            truth = smooth(truth)
            meter.note(picture)

            def _forward():
                result = model(picture)
                return loss_of(result, truth)

            def _backward(loss):
                loss.backward()

            loss = _forward()
            loss = loss / 4
            _backward(loss)
    """,
    [("model(picture)", "forward"), ("    loss.backward()", "backward")],
    inside=[
        ("forward", "model(picture)", "loss = _forward()"),
        ("backward", "    loss.backward()", "   _backward(loss)"),
    ],
)


def test_what_a_function_inside_the_loops_takes_from_it_is_a_part_of_the_batch():
    for part in ("picture = blur", "truth = smooth"):
        assert CLOSED_OVER.phase(part, slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT
    assert CLOSED_OVER.phase("loss = loss / 4", slot=AFTER_FORWARD) is Phase.FORWARD
    assert CLOSED_OVER.phase("meter.note", slot=AFTER_FORWARD) is Phase.OTHER


def test_a_line_is_counted_as_python_counts_it():
    """A form feed, by which some divide a file into pages, does not end a line."""
    sources = Sources({"a.py": "import x\n\x0c\ndef f():\n    a = '\x85\u2028'\n    b = 2\n"})
    assert sources.line("a.py", 5) == "b = 2"
    assert sources.line("a.py", 99) == ""


def test_a_file_is_one_tree_for_all_who_ask():
    sources = Sources({"a.py": "x = 1\n", "b.py": "x =\n"})
    assert sources.tree("a.py") is sources.tree("a.py")
    assert sources.tree("b.py") is None


PLAYS = """
    def play(houses, memory, choose):
        before = houses.view()
        floors = choose(before)
        rewards = houses.act(floors)
        memory.add(before, floors, rewards)

    def choose(view):
        with no_grad():
            return net(view).argmax(1)

    def view(self):
        return stack(self.waiting)

    def act(self, floors):
        self.waiting[floors] = 0
        return -self.waiting.sum()

    def add(self, *row):
        self.rows.append(row)

    for step in range(100):
        play(town, memory, choose)
        loss = criterion(net(memory.draw()))
        loss.backward()
"""
CHOOSING = ("evaluation", "net(view)", "floors = choose", "play(town")
MADE = [("criterion(net", "forward"), ("loss.backward", "backward")]


def test_who_is_told_what_a_model_chose_and_gives_what_it_chooses_by_is_an_environment():
    looking = ("evaluation", "return stack", "before = houses.view", "play(town")  # its gaps are like it
    script = Script(PLAYS, MADE, [looking, CHOOSING])

    def acts(*parts: str) -> str:
        return script.roles.exchanges(script.stack(*parts))

    assert acts("return -self.waiting", "rewards = houses.act", "play(town") == ENVIRONMENT
    assert acts("return stack", "before = houses.view", "play(town") == ENVIRONMENT
    assert acts("rewards = houses.act", "play(town") == ENVIRONMENT
    assert acts("net(view)", "floors = choose", "play(town") == ROLLOUT
    assert acts("self.rows.append", "memory.add", "play(town") == ""
    assert acts("loss = criterion") == ""
    assert Script(PLAYS, MADE).roles.exchanges(script.stack("rewards = houses.act", "play(town")) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory.add(before, floors, rewards)", "total += rewards"),  # how well it does
        ("memory.add(before, floors, rewards)", "print(before, floors, rewards)"),
        ("memory.add(before, floors, rewards)", "memory.add(before, rewards)"),
        ("before = houses.view()", "before = next(batches)"),  # who is told shows nothing
        ("rewards = houses.act(floors)", "houses.act(floors)"),  # and answers nothing
        ("self.waiting[floors] = 0", "self.told += 1"),  # and shows the same whatever it was told
        ("def play(houses", "def evaluate(houses"),
        ("def play(houses", "def forward(houses"),  # inside of a model
    ],
)
def test_who_only_scores_or_goes_on_is_no_environment(old, new):
    script = Script(PLAYS.replace(old, new), MADE, [CHOOSING])
    told = "houses.act(floors)"
    assert script.roles.exchanges(script.stack(told, "play(town")) == ""


def test_what_is_chosen_and_what_is_answered_may_be_kept_one_by_one():
    kept = "floors_seen.append(floors); answers.append(rewards)"
    script = Script(PLAYS.replace("memory.add(before, floors, rewards)", kept), MADE, [CHOOSING])
    assert script.roles.exchanges(script.stack("rewards = houses.act", "play(town")) == ENVIRONMENT


def test_an_environment_may_show_what_it_answers_and_change_what_it_holds():
    source = """
        def collect(board, policy, rows):
            seen = board.begin()
            for _ in range(9):
                move = policy(seen)
                seen, won = board.play(move)
                rows.append((seen, move, won))

        def begin(self):
            self.squares.clear()
            self.note("begun")
            return self.shown()

        def shown(self):
            return tensor(self.squares)

        def play(self, move):
            self.squares.push(move)
            return self.shown(), self.squares.over()

        while True:
            collect(game, choose, kept)
            loss = criterion(net(draw(kept)))
            loss.backward()
    """
    script = Script(source, MADE, [("evaluation", "move = policy", "collect(game")])
    assert script.roles.exchanges(script.stack("seen, won = board", "collect(game")) == ENVIRONMENT
    assert script.roles.exchanges(script.stack("move = policy", "collect(game")) == ROLLOUT


TRAINS = """
    for step in range(100):
        loss = criterion(net(draw()))
        loss.backward()
"""
SCALER = f"""
    def transform(self, x):
        return (x - self.mean) / self.spread

    def inverse_transform(self, x):
        return x * self.spread + self.mean
{TRAINS}
        for x, y in held_out:
            x = scaler.transform(x)
            chosen = net(x)
            told = scaler.inverse_transform(chosen)
            rows.append((chosen, told))
"""
SCALER_OF_ONE_NAME = SCALER.replace("told = scaler", "chosen = scaler").replace("(chosen, told)", "chosen")
TOKENIZER = f"""
    def encode(self, text):
        return [self.index.setdefault(word, len(self.index)) for word in text.split()]

    def decode(self, ids):
        self.decoded += len(ids)
        return " ".join(self.words[each] for each in ids)
{TRAINS}
        for text in prompts:
            ids = words.encode(text)
            chosen = net.generate(ids)
            told = words.decode(chosen)
            table.add_data(text, chosen, told)
"""
CACHE = f"""
    def length(self):
        return self.size

    def put(self, k, v):
        self.keys.append(k)
        self.values.append(v)
        self.size += 1
        return cat(self.keys), cat(self.values)

    def forward(x, cache):
        q, k, v = project(x, cache.length())
        told, values = cache.put(k, v)
        return attend(q, told, values)
{TRAINS}
        chosen = net(start)
"""
CACHE_OF_LAYERS = CACHE.replace("def forward", "def generate").replace(
    """\
        q, k, v = project(x, cache.length())
        told, values = cache.put(k, v)
        return attend(q, told, values)
""",
    """\
        for layer in layers:
            q, k, v = layer.project(x, cache.length())
            told, values = cache.put(k, v)
            x = layer.attend(q, told, values)
        return head(x)
""",
)
SCORES = f"""
    def draw(self):
        self.at += 1
        return self.rows[self.at]

    def score(self, chosen):
        self.right += int(chosen == self.truths[self.at])
        return self.right / self.at
{TRAINS}
        for _ in range(9):
            x = puzzles.draw()
            chosen = net(x)
            told = puzzles.score(chosen)
            rows.append((chosen, told))
"""


@pytest.mark.parametrize(
    ("source", "tells", "stack"),
    [
        pytest.param(SCALER, "told = scaler", ("chosen = net",), id="scaler"),
        pytest.param(SCALER_OF_ONE_NAME, "scaler.inverse", ("chosen = net",), id="scaler-of-one-name"),
        pytest.param(TOKENIZER, "told = words", ("chosen = net",), id="tokenizer"),
        pytest.param(CACHE, "told, values =", ("q, k, v =", "chosen = net"), id="cache"),
        pytest.param(CACHE_OF_LAYERS, "told, values =", ("q, k, v =", "chosen = net"), id="layers"),
        pytest.param(SCORES, "told = puzzles", ("chosen = net",), id="scores"),
    ],
)
def test_what_turns_predictions_into_something_else_or_keeps_or_scores_them_is_no_environment(
    source, tells, stack
):
    script = Script(source, MADE, [("evaluation", *stack)])
    assert script.roles.exchanges(script.stack(tells, *stack[1:])) == ""
    assert script.roles.exchanges(script.stack(*stack)) == "", "nor does the model act in it"


def test_an_environment_behind_an_argument_is_found_in_a_whole_script():
    source = (CHECKOUT / "benchmarks/accuracy/tuning/lift_dispatch.py").read_text()
    plays = "play(buildings, memory, learner.choose)"
    sites = [("values = self.online(before)", "forward"), ("loss.backward()", "backward")]
    choosing = ("evaluation", "floors = self.online(torch", "floors = choose(before)", plays)
    script = Script(source, sites, [choosing])

    def acts(*parts: str) -> str:
        return script.roles.exchanges(script.stack(*parts))

    assert acts("self.waiting += self.rng", "rewards = buildings.act(floors)", plays) == ENVIRONMENT
    assert acts("car = np.zeros_like", "before = buildings.view()", plays) == ENVIRONMENT
    assert acts("floors = self.online(torch", "floors = choose(before)", plays) == ROLLOUT
    assert acts("rows = (self.next", "memory.add(before, floors", plays) == ""
    assert acts("best = self.online(after)", "result = learner.update") == ""


def long_script(num_lines: int) -> str:
    """A model that is written out, and called without gradients beside the environment that it acts in."""
    layers = "".join(f"        x = self.layers[{i}](x) + step_{i}(x)\n" for i in range(num_lines // 2))
    beside = "".join(f"        rest_{i} = helper.made(rest_{i - 1})\n" for i in range(1, num_lines // 2))
    play = PLAYS.replace("        memory.add(", f"{beside}        memory.add(", 1)
    return f"{play}\n    def made(self, x):\n        return x\n\n    def forward(self, x):\n{layers}"


def test_what_passes_without_gradients_is_read_in_time_of_its_length(monkeypatch):
    """A script of 400 lines, of each of which there is a sample."""
    script = Script(long_script(400), MADE)
    text, visited = "\n".join(script.lines), 0
    one_by_one, reaches = ast.iter_child_nodes, Blocks.reaches

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        nonlocal visited
        visited += 1
        return one_by_one(node)

    def reach(blocks: Blocks, *flow: Any) -> bool:
        nonlocal visited
        visited += 1
        return reaches(blocks, *flow)

    sites = [(kind, FILE, script.line(part), "f", 1) for part, kind in MADE]
    own = [(FILE, line, script.function(line)) for line, code in enumerate(script.lines, 1) if code]
    samples = [(0, SLOT_OF["evaluation"], [("", 0, ""), frame], 1) for frame in own]
    sources = Sources({FILE: text})
    nodes = sum(1 for _ in ast.walk(sources.tree(FILE)))
    monkeypatch.setattr(ast, "iter_child_nodes", visit)
    monkeypatch.setattr(Blocks, "reaches", reach)
    roles = Roles(sites, sources, samples)
    assert len(script.lines) > 400
    assert visited < 30 * nodes
    stack = script.stack("rewards = houses.act", "play(town")
    assert roles.exchanges(stack) == ENVIRONMENT


def test_ranks_on_which_samples_fell_on_other_lines_of_a_function_are_of_the_same_roles():
    script = Script(PLAYS, MADE)

    def anchors(*stacks: tuple[str, ...]) -> Any:
        return anchors_of(
            [], [(0, SLOT_OF["evaluation"], [("", 0, ""), *script.stack(*parts)], 1) for parts in stacks]
        )

    assert anchors(CHOOSING[2:]) == anchors(CHOOSING[2:], ("before = houses", "play(town"))
    assert anchors(CHOOSING[2:]) != anchors(CHOOSING[2:], ("return stack", "before = houses", "play(town"))


FILTERS = Script(
    """
    def smoothed(x):
        return pool(x)

    def load_files(names):
        return parse(names)

    def pictures(names):
        return stack([tensor(Image.open(name)) for name in names])

    def train(batches, order, disk):
        for step in range(100):
            x, y = next(batches)
            x = smoothed(x)
            z = load_files(y)
            rows = order[step : step + 9]
            w = noise(rows)
            p = pictures(y)
            q = [cv2.imread(each) for each in y]
            r = disk[y]
            s = prepared(disk[y])
            t = (y - 3) / 255
            u = y[y > 3]
            loss = criterion(model(x, z, w, p, q, r, s, t, u), y)
            loss.backward()
    """,
    [("criterion(model", "forward"), ("loss.backward", "backward")],
)


@pytest.mark.parametrize(
    ("stack", "works"),
    [
        (("return pool", "x = smoothed"), True),
        (("x, y = next",), False),
        (("return parse", "z = load_files"), False),
        (("w = noise",), False),
        (("return stack", "p = pictures"), False),  # opens files
        (("return pool", "p = pictures"), True),
        (("q = [",), False),
        (("r = disk",), False),  # which may be read there
        (("s = prepared",), False),
        (("t = (y",), True),
        (("u = y",), True),
        (("loss.backward",), False),
    ],
)
def test_what_is_computed_of_a_batch_in_hand_is_work_and_what_gets_or_reads_it_is_not(stack, works):
    found = FILTERS.roles.works_on_batch(FILTERS.stack(*stack), AFTER_OPTIMIZER)
    assert found is works
