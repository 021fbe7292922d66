"""Environments that are functions or simulations, and what acts like one and is none."""

from __future__ import annotations

import pytest

from diagnose.source.purposes import ENVIRONMENT, ROLLOUT
from tests.sampled_script import Script
from tests.test_environments import CHOOSING, MADE, PLAYS, TRAINS

OF_FUNCTIONS = """
    def drop(board, cell):
        return [*board, cell], score(board)

    def score(board):
        return sum(board)

    def planes(board):
        return tensor(board)

    while True:
        cell = choose(planes(board))
        board, won = drop(board, cell)
        kept.append((cell, won))
        if score(board) > 9:
            board = []
        loss = criterion(net(draw(kept)))
        loss.backward()

    def choose(seen):
        with no_grad():
            return net(seen).argmax(1)
"""


def acts_among_functions(source: str, *parts: str) -> str:
    script = Script(source, MADE, [("evaluation", "return net(seen)", "cell = choose")])
    return script.roles.exchanges(script.stack(*parts))


def test_an_environment_may_be_functions_that_answer_what_has_become_of_what_they_are_given():
    assert acts_among_functions(OF_FUNCTIONS, "return [*board", "board, won = drop") == ENVIRONMENT
    assert acts_among_functions(OF_FUNCTIONS, "return sum(board)", "if score(board)") == ENVIRONMENT
    assert acts_among_functions(OF_FUNCTIONS, "return net(seen)", "cell = choose") == ROLLOUT
    assert acts_among_functions(OF_FUNCTIONS, "kept.append") == ""
    stateless = OF_FUNCTIONS.replace(
        "drop(board, cell)\n        kept", "rules.drop(board, cell)\n        kept"
    )
    assert acts_among_functions(stateless, "return [*board", "board, won = rules.drop") == ENVIRONMENT


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("planes(board))\n", "planes(next(rows)))\n"),  # it shows the model nothing
        ("drop(board, cell)\n        kept", "drop(cell)\n        kept"),  # it is not told what it was
        ("kept.append((cell, won))", "kept.append(won)"),  # as where a model writes on
        ("kept.append((cell, won))", "kept.append(cell)"),
        ("board, won = drop(board, cell)\n        kept", "board, won = cat(board, cell)\n        kept"),
    ],
)
def test_functions_that_show_the_model_nothing_or_of_which_no_choice_is_kept_are_no_environment(old, new):
    source = OF_FUNCTIONS.replace(old, new)
    assert source != OF_FUNCTIONS
    assert acts_among_functions(source, "board, won =") == ""


SAMPLES = f"""
    def __getitem__(self, number):
        wave, label = self.cut(number)
        begin = first(wave)
        wave = restored(wave, begin)
        return wave, label, begin

    def first(wave):
        return wave.argmax()

    def cut(self, number):
        return self.waves[number, : self.length], self.labels[number]

    def restored(wave, begin):
        return wave + begin
{TRAINS}
        for x, y in held_out:
            hits += (net(x) == y).sum()
"""


def test_who_asks_no_model_what_to_make_of_a_sample_acts_in_no_environment():
    inside = ("wave = restored", "for x, y in held_out")
    before = ("evaluation", "begin = first", inside[1])
    script = Script(SAMPLES, MADE, [before, ("evaluation", *inside)])
    assert script.roles.exchanges(script.stack(*inside)) == ""


ASKS = """
    class Yard:
        def run(self):
            while self.calendar:
                self.calendar.pop()()
            return self.moves

        def drive(self):
            self.due += sum(self.heights)

        def arrive(self):
            seen = list(self.heights)
            place = self.chooser(seen)
            self.heights[place] += 1
            cost = self.heights[place] + self.due
            self.moves.append((seen, place, -cost))

    def choose(seen):
        with no_grad():
            return net(seen).argmax()

    yard = Yard(choose)
    while True:
        moves = yard.run()
        loss = criterion(net(moves))
        loss.backward()
"""


def asks_in_yard(source: str, *parts: str) -> str:
    choosing = ("evaluation", "return net(seen)", "= self.chooser", "self.calendar.pop", "moves = yard")
    script = Script(source, MADE, [choosing])
    stack = script.stack(*parts)
    methods = ("run", "drive", "arrive")
    named = [(file, n, f"Yard.{name}" if name in methods else name) for file, n, name in stack]
    return script.roles.exchanges(named)


def test_an_environment_may_be_a_simulation_that_asks_the_policy():
    asked = ("self.calendar.pop", "moves = yard")
    assert asks_in_yard(ASKS, "self.due += sum", *asked) == ENVIRONMENT
    assert asks_in_yard(ASKS, "cost = self.heights", *asked) == ENVIRONMENT
    assert asks_in_yard(ASKS, "return net(seen)", "place = self.chooser", *asked) == ROLLOUT
    assert asks_in_yard(ASKS, "moves = yard") == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.heights[place] += 1", "self.heights = place"),  # a sampler's chains
        ("seen = list(self.heights)", "seen = next(rows)"),
        ("self.moves.append((seen, place, -cost))", "self.moves.append(place)"),
        ("            return self.moves\n", "            loss.backward()\n            return self.moves\n"),
    ],
)
def test_an_object_that_keeps_what_a_model_says_or_that_learns_is_no_environment(old, new):
    source = ASKS.replace(old, new)
    assert source != ASKS
    if "loss.backward" in new:
        source = source.replace("        loss = criterion(net(moves))\n        loss.backward()\n", "")
        source = source.replace(
            "            loss.backward()", "            loss = criterion(net(1)); loss.backward()"
        )
    assert asks_in_yard(source, "self.due += sum", "self.calendar.pop", "moves = yard") == ""


def test_what_came_of_a_choice_may_be_asked_for_or_read_after_it_was_told():
    told = PLAYS.replace("rewards = houses.act(floors)", "houses.act(floors)")
    asked = told.replace("memory.add(before, floors, rewards)", "memory.add(before, floors, houses.view())")
    read = told.replace("memory.add(before, floors, rewards)", "memory.add(before, floors, houses.waiting)")
    for text in (asked, read):
        script = Script(text, MADE, [CHOOSING])
        assert script.roles.exchanges(script.stack("houses.act(floors)", "play(town")) == ENVIRONMENT
        assert script.roles.exchanges(script.stack("net(view)", "floors = choose", "play(town")) == ROLLOUT


REPLAY = """
    def study(memory, old, seen):
        rows = memory.draw()
        with no_grad():
            goals = old(rows)
        errors = distance(goals, rows)
        memory.put(rows, errors)
        seen.append(errors)
        sizes.append(rows)

    def draw(self):
        return self.held.find(random())

    def put(self, rows, errors):
        self.held[rows] = errors

    for step in range(100):
        study(memory, old, seen)
        loss = criterion(net(memory.draw()))
        loss.backward()
"""


def test_a_memory_that_is_told_by_what_to_draw_is_no_environment():
    script = Script(REPLAY, MADE, [("evaluation", "goals = old(rows)")])
    assert script.roles.exchanges(script.stack("memory.put(rows")) == ""


def test_an_environment_may_call_what_it_holds_as_a_model_calls_its_weights():
    model = """
    class Ranker:
        def __init__(self):
            self.waiting = nn.Parameter(zeros(9))

    class Houses:
    """
    inside = PLAYS.replace("def view(self)", "def view_(self)")  # PLAYS' methods, in classes
    lines = inside.splitlines()
    begin, end = (
        next(i for i, text in enumerate(lines) if part in text) for part in ("def view_", "def add")
    )
    methods = "\n".join(f"    {text}" for text in lines[begin:end]).replace("view_", "view")
    source = "\n".join([model, methods, *lines[:begin], *lines[end:]])
    script = Script(source, MADE, [CHOOSING])
    assert script.roles.exchanges(script.stack("rewards = houses.act", "play(town")) == ENVIRONMENT


def test_an_environment_of_functions_may_only_answer_what_has_become_of_it():
    source = OF_FUNCTIONS.replace("return [*board, cell], score(board)", "return [*board, cell]")
    source = source.replace("board, won = drop", "board = drop")
    for came in ("won = score(board)", "won = 9 - board[0]"):
        told = source.replace("board = drop(board, cell)", f"board = drop(board, cell); {came}")
        assert acts_among_functions(told, "return [*board", "board = drop(board, cell)") == ENVIRONMENT


SAMPLER = """
    def restored(x, noise, t):
        return x - noise * strength[t]

    def moved(x, clean, t):
        return x + (clean - x) * rate[t]

    def sample(x):
        pictures, guesses = [], []
        for t in reversed(range(1000)):
            with no_grad():
                noise = net(x)
            clean = restored(x, noise, t)
            guesses.append(clean)
            x = moved(x, clean, t)
            pictures.append(x)
        return pictures, guesses
"""
CENTRES = """
    def moved(centre, seen):
        return 0.9 * centre + 0.1 * seen.mean(0)

    def sample(x):
        with no_grad():
            target = softmax(net(x) - centre)
        student.learn(x, target)
        centre = moved(centre, target)
        save(centre)
"""
WRITER = """
    def extended(words, word):
        return [*words, word]

    def sample(words):
        odds = []
        for _ in range(100):
            with no_grad():
                scores = net(words)
            word = scores.multinomial(1)
            odds.append(scores[word])
            words = extended(words, word)
        return words, odds
"""
PRIORITIES = """
    class Memory:
        def draw_rows(self):
            return self.rows[chosen(self.priorities)]

        def put(self, rows, errors):
            self.priorities[rows] = errors

    def sample(memory):
        rows = memory.draw_rows()
        with no_grad():
            goals = net(rows).argmax(1)
        values = online(rows)
        errors = (goals - values).detach().cpu().numpy()
        memory.put(rows, errors)
        history.append(errors.mean())
        largest["priority"] = memory.priorities.max()
"""
CUTS = """
    def cut(x, rows):
        return x[rows]

    def sample(loader):
        for x, y in loader:
            with no_grad():
                rows = net(x).argmax(1)
            seen.append(rows)
            x = cut(x, rows)
            sizes = score(x)
            student.learn(x, y, sizes)
"""
SAMPLED = """
    while True:
        sample(rows)
        loss = criterion(net(draw()))
        loss.backward()
"""


@pytest.mark.parametrize(
    ("source", "asks", "tells"),
    [
        (SAMPLER.replace("net(x)", "net(x).sample"), "noise = net(x)", "x = moved("),
        (CUTS, "rows = net(x)", "x = cut("),  # a batch is another one in each turn
        (SAMPLER, "noise = net(x)", "x = moved("),  # a picture is made of what the model gives: no choice
        (CENTRES, "target = softmax", "centre = moved("),
        (WRITER, "scores = net(words)", "words = extended("),  # what is written is all that is kept
        (PRIORITIES, "goals = net(rows)", "memory.put("),  # an error of what is learned
    ],
)
def test_who_goes_on_from_values_of_a_model_or_from_errors_acts_in_no_environment(source, asks, tells):
    made = [("criterion(net(draw", "forward"), ("loss.backward", "backward")]
    made += [("values = online", "forward")] if "online" in source else []
    script = Script(source + SAMPLED, made, [("evaluation", asks, "sample(rows)")])
    assert script.roles.exchanges(script.stack(tells, "sample(rows)")) == ""


def test_an_object_that_follows_the_mean_of_a_models_values_is_no_environment():
    source = """
    class Yard:
        def arrive(self, seen):
            with no_grad():
                value = self.net(seen) * self.spread + self.mean
            self.mean += 0.01 * (value.mean() - self.mean)
            self.kept.append(self.mean)
            return value

        def drive(self):
            return self.kept[-1]

    while True:
        values = yard.arrive(rows)
        loss = criterion(net(values))
        loss.backward()
    """
    script = Script(source, MADE, [("evaluation", "value = self.net", "values = yard")])
    (file, line, _), around = script.stack("return self.kept", "values = yard")
    assert script.roles.exchanges([(file, line, "Yard.drive"), around]) == ""
