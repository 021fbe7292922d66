"""Who is an environment: it is told what a model chose, and gives what the model chooses by."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diagnose.core.ledger import SLOT_OF
from diagnose.core.phases import Phase
from diagnose.source.blocks import Blocks
from diagnose.source.purposes import ENVIRONMENT, ROLLOUT
from diagnose.source.roles import Roles
from diagnose.source.sites import anchors_of
from diagnose.source.sources import Sources
from tests.sampled_script import AFTER_FORWARD, FILE, PASSES, Script

CHECKOUT = Path(__file__).parents[1]

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
        ("rewards = houses.act(floors)", "rewards = houses.left; houses.act(floors)"),
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


COMES_BACK = """
    def play(placer, boards, views, memory):
        cells = placer.choose(views)
        moves = [board.place(cell) for board, cell in zip(boards, cells)]
        after = stack([view for view, _ in moves])
        memory.add(views, cells, [reward for _, reward in moves], after)
        return after

    def choose(self, views):
        with no_grad():
            return net(views).argmax(1)

    def place(self, cell):
        self.taken[cell] = 1
        return self.taken.copy(), -self.length()

    def length(self):
        return sum(self.taken)

    while True:
        views = play(placer, boards, views, memory)
        loss = criterion(net(memory.draw()))
        loss.backward()
"""


def acts_where_answers_come_back(source: str, *parts: str) -> str:
    choosing = ("evaluation", "return net(views)", "cells = placer", "= play(placer")
    script = Script(source, MADE, [choosing])
    return script.roles.exchanges(script.stack(*parts, "= play(placer"))


def test_an_environment_may_show_what_comes_back_to_the_function_that_acts_in_it():
    inside = ("return sum", "return self.taken", "moves = [board")
    assert acts_where_answers_come_back(COMES_BACK, *inside) == ENVIRONMENT
    assert acts_where_answers_come_back(COMES_BACK, "return net(views)", "cells = placer") == ROLLOUT
    assert acts_where_answers_come_back(COMES_BACK, "memory.add") == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "views = play(placer, boards, views",
            "after = play(placer, boards, views",
        ),  # asked anew each time
        ("return after", "return views"),
        ("self.taken[cell] = 1", "self.told"),
        ("memory.add(views, cells, [reward for _, reward in moves], after)", "memory.add(views, cells)"),
    ],
)
def test_what_does_not_come_back_is_shown_by_no_environment(old: str, new: str):
    source = COMES_BACK.replace(old, new)
    assert source != COMES_BACK
    assert acts_where_answers_come_back(source, "return self.taken", "moves = [board") == ""


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


ON_POLICY_WITH_GRADIENTS = Script(
    """
    while update < steps:
        level = feed.level(update)
        rewards, values = [], []
        for _ in range(24):
            logits, value = policy(scale(grid.observe()))
            choice = Categorical(logits=logits)
            move = choice.sample()
            moves.append(move.numpy())
            rewards.append(from_numpy(grid.step(moves[-1], level)))
            values.append(value)
        loss = (stack(rewards) - stack(values)).square().mean()
        loss.backward()
        optimizer.step()
    """,
    [("= policy(", "forward"), *PASSES],
)


def test_what_is_stepped_with_what_a_policy_chose_is_an_environment_whatever_it_is_called():
    line = "rewards.append(from_numpy"
    assert ON_POLICY_WITH_GRADIENTS.phase(line, slot=AFTER_FORWARD) is Phase.DATA_WAIT
    roles = ON_POLICY_WITH_GRADIENTS.roles
    (stack,) = ON_POLICY_WITH_GRADIENTS.stack(line)
    assert roles.acts([("/home/u/grid.py", 3, "Grid.step"), stack])
    assert not roles.acts([("/home/u/grid.py", 3, "Grid.observe"), stack])
    assert not roles.acts(ON_POLICY_WITH_GRADIENTS.stack("optimizer.step"))


def test_what_an_environment_or_a_policy_does_inside_may_be_called_an_evaluation():
    text = PLAYS.replace("return -self.waiting.sum()", "return self.evaluate()").replace(
        "    def add(self, *row):",
        "    def evaluate(self):\n        return -self.waiting.sum()\n\n    def add(self, *row):",
    )
    script = Script(text, MADE, [CHOOSING])
    inside = ("return -self.waiting", "return self.evaluate", "rewards = houses.act", "play(town")
    assert script.roles.exchanges(script.stack(*inside)) == ENVIRONMENT
    measured = Script(text.replace("def play(", "def validate("), MADE, [CHOOSING])
    assert measured.roles.exchanges(measured.stack(*inside)) == ""
