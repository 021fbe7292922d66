"""Code that works on what a model has computed: followed from the loop through the calls of a stack."""

from __future__ import annotations

from textwrap import dedent

import pytest

from diagnose.core.ledger import SLOT_OF
from diagnose.source.places import Places
from diagnose.source.results import Results
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from tests.sampled_script import Script

FILE = "/home/u/train.py"

SCRIPT = """
class Book:
    def note(self, guess, truth, weight=1):
        pairs = list(zip(guess, truth))
        for g, t in pairs:
            self.table[g][t] += 1  # keyword or place
        self.pages += 1  # nothing of it

    def on_end(self, trainer, outputs):
        table = [sorted(row) for row in outputs]  # of a callback
        return settle(table)

def settle(rows):
    return sum(row[0] for row in rows)  # two calls away

def shuffle(order):
    order.sort(key=hash)  # of something else

def train():
    for x, y in loader:
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        best = out.argmax(1)
        book.note(best, truth=y)
        for callback in callbacks:
            callback.on_end(trainer, out)
        shuffle(order)
        book.note(loss.item(), 1)  # only of the loss
        memory.update(out)  # back into training
"""


def line(part: str) -> int:
    return next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if part in text)


def stack(*frames: tuple[str, str]) -> list[tuple[str, int, str]]:
    return [(FILE, line(part), function) for part, function in frames]


@pytest.fixture
def reaches():
    sources = Sources({FILE: dedent(SCRIPT)})
    sites = [
        ("next", "for x, y"),
        ("forward", "out = model"),
        ("backward", "loss.back"),
        ("optimizer", "optimizer.s"),
    ]
    roles = Roles([(kind, FILE, line(part), "train", 1) for kind, part in sites], sources)
    results = Results(Places(sources))

    def ask(*frames: tuple[str, str]) -> bool:
        found = roles.results(stack(*frames))
        return found is not None and results.reach(*found)

    return ask


@pytest.mark.parametrize(
    ("frames", "reached"),
    [
        ((("best = out", "train"),), True),
        ((("book.note(best", "train"),), True),
        ((("# keyword or place", "Book.note"), ("book.note(best", "train")), True),
        ((("# nothing of it", "Book.note"), ("book.note(best", "train")), False),
        ((("# keyword or place", "Book.note"), ("# only of the loss", "train")), False),
        ((("# of a callback", "Book.on_end"), ("callback.on_end", "train")), True),
        ((("# of a callback", "Book.on_end.<locals>.<listcomp>"), ("# of a callback", "Book.on_end"),
          ("callback.on_end", "train")), True),
        ((("# two calls away", "settle"), ("return settle", "Book.on_end"), ("callback.on_end", "train")),
         True),
        ((("# of something else", "shuffle"), ("shuffle(order)", "train")), False),
        ((("# two calls away", "settle"),), False),
    ],
)  # fmt: skip
def test_results_are_followed_through_the_calls_of_a_stack(reaches, frames, reached):
    assert reaches(*frames) is reached


def test_what_is_given_to_that_which_batches_are_made_of_trains():
    text = SCRIPT.replace("for x, y in loader:", "for _ in range(9):\n        x, y = memory.draw()")
    sources = Sources({FILE: text})
    at = {part: 1 + next(n for n, row in enumerate(text.splitlines()) if part in row)
          for part in ("out = model", "loss.back", "memory.update", "best = out")}  # fmt: skip
    roles = Roles(
        [("forward", FILE, at["out = model"], "train", 1), ("backward", FILE, at["loss.back"], "train", 1)],
        sources,
    )
    for part, reached in (("memory.update", False), ("best = out", True)):
        found = roles.results([(FILE, at[part], "train")])
        assert found is not None and Results(Places(sources)).reach(*found) is reached


OBJECT = """
class Pix:
    def forward(self):
        self.fake = self.net(self.real)

    def backward(self):
        self.loss = distance(self.fake)
        self.loss.backward()

    def optimize(self):
        self.forward()
        self.backward()

    def note(self):
        self.notes = describe(self.fake)

    def write(self):
        self.rows = str(self.loss)

for data in loader:
    pix.optimize()
    pix.note()
    pix.write()
"""


@pytest.mark.parametrize(("line", "caller", "reached"), [(15, 22, True), (18, 23, False)])
def test_results_are_found_in_the_object_that_a_method_put_them_into(line, caller, reached):
    sources = Sources({FILE: OBJECT})
    inside = [
        (
            0,
            SLOT_OF["forward"],
            [("", 0, ""), (FILE, 4, "forward"), (FILE, 11, "optimize"), (FILE, 21, "")],
            1,
        ),
        (
            0,
            SLOT_OF["backward"],
            [("", 0, ""), (FILE, 8, "backward"), (FILE, 12, "optimize"), (FILE, 21, "")],
            1,
        ),
    ]
    roles = Roles(
        [("forward", FILE, 4, "forward", 1), ("backward", FILE, 8, "backward", 1)], sources, inside
    )
    found = roles.results([(FILE, line, "note"), (FILE, caller, "<module>")])
    assert found is not None and Results(Places(sources)).reach(*found) is reached


HANDED_OVER = """
class Loop:
    def run(self):
        for self.x, self.y in self.loader:
            self.out = self.net(self.x)
            self.loss = distance(self.out, self.y)
            self.loss.backward()
            self.optimizer.step()
            for each in self.callbacks:
                each.on_step(self)  # hands itself over
            self.bus.fire("end", loop=self)  # by name

class Table:
    def on_step(self, loop):
        for g in loop.out.argmax(1).tolist():  # of the results
            self.cells[g] += 1
        self.curve = sorted(loop.loss)  # of the loss

class Bus:
    def fire(self, name, loop):
        for each in self.listeners:
            getattr(each, name)(loop)  # further on
"""


@pytest.mark.parametrize(
    ("frames", "reached"),
    [
        ((("# of the results", "Table.on_step"), ("# hands itself over", "Loop.run")), True),
        ((("# of the loss", "Table.on_step"), ("# hands itself over", "Loop.run")), False),
        ((("# of the results", "Table.on_step"), ("# further on", "Bus.fire"), ("# by name", "Loop.run")),
         True),
        ((("# of the loss", "Table.on_step"), ("# further on", "Bus.fire"), ("# by name", "Loop.run")),
         False),
    ],
)  # fmt: skip
def test_results_are_followed_in_an_object_that_is_given_to_a_function(frames, reached):
    rows = HANDED_OVER.splitlines()

    def at(part: str) -> int:
        return 1 + next(n for n, row in enumerate(rows) if part in row)

    sources = Sources({FILE: HANDED_OVER})
    sites = [("next", "for self.x"), ("forward", "self.net("), ("backward", "self.loss.back")]
    roles = Roles([(kind, FILE, at(part), "run", 1) for kind, part in sites], sources)
    found = roles.results([(FILE, at(part), function) for part, function in frames])
    assert found is not None and Results(Places(sources)).reach(*found) is reached


IN_AN_OBJECT = """
for x, y in loader:
    out = model(x, y)
    {loss}.backward()
    optimizer.step()
    hits = tally({logits}, y)
    rows = {logits}.tolist()
    right += compare(rows, y)
    note = {loss}.item()
    total += note
    report(out)
"""


@pytest.mark.parametrize(
    ("loss", "logits"), [("out.loss", "out.logits"), ("out['loss']", "out['logits']"), ("out[0]", "out[1]")]
)
@pytest.mark.parametrize(
    ("line", "is_score"), [(3, False), (6, True), (7, True), (8, True), (9, False), (10, False), (11, True)]
)
def test_of_an_object_with_the_loss_in_it_the_rest_are_results(
    loss: str, logits: str, line: int, is_score: bool
):
    assert _is_score(IN_AN_OBJECT.format(loss=loss, logits=logits), line) is is_score


@pytest.mark.parametrize(
    ("trained", "is_score"),
    [
        ("out.loss.backward()", True),
        ("scaler.scale(out.loss).backward()", True),
        ("out.backward()", False),
        ("out.mean().backward()", False),
        ("crit(out, y).backward()", False),
        ("crit(out.logits, y).backward()", False),
    ],
)
def test_only_what_the_backward_pass_does_not_read_of_an_object_is_a_result(trained: str, is_score: bool):
    text = IN_AN_OBJECT.format(loss="out.loss", logits="out.logits")
    assert _is_score(text.replace("out.loss.backward()", trained), 6) is is_score


def _is_score(text: str, line: int) -> bool:
    script = Script(text, [("for x, y", "next"), ("= model(", "forward"), (".backward", "backward")])
    found = script.roles.results([(FILE, line, "<module>")])
    return found is not None and Results(Places(Sources({FILE: text}))).reach(*found)


TRACKED = """
class Trainer:
    def track(self, step, o):
        level = o{loss}.item()
        for old in self.levels:
            self.jumps += level > old
        for g, t in zip(o{logits}, step):
            self.hits += g == t

    def ends(self, each):
        self.track(1, each)

    def ends_all(self):
        self.track(1, self.out)

    def fit(self):
        for x, y in loader:
            self.out = self.model(x, y)
            self.out{loss}.backward()
            {call}  # handed on
"""


@pytest.mark.parametrize(("loss", "logits"), [(".loss", ".logits"), ("['loss']", "['logits']")])
@pytest.mark.parametrize(
    ("call", "via"),
    [
        ("self.track(2, self.out)", ()),
        ("self.track(2, o=self.out)", ()),
        ("self.ends(self.out)", ("self.track(1, each)",)),
        ("self.ends_all()", ("self.track(1, self.out)",)),
    ],
)
@pytest.mark.parametrize(
    ("line", "is_score"), [("level =", False), ("level > old", False), ("in zip(", True), ("hits +=", True)]
)
def test_who_gets_such_an_object_and_reads_the_loss_alone_scores_nothing(
    loss: str, logits: str, call: str, via: tuple[str, ...], line: str, is_score: bool
):
    text = TRACKED.format(loss=loss, logits=logits, call=call)
    script = Script(text, [("for x, y", "next"), ("self.model(", "forward"), (".backward", "backward")])
    found = script.roles.results(script.stack(line, *via, "handed on"))
    assert found is not None
    assert Results(Places(Sources({FILE: text}))).reach(*found) is is_score


@pytest.mark.parametrize(("line", "is_score"), [(9, True), (10, False)])
def test_of_such_an_object_only_the_rest_comes_back_as_a_result(line: int, is_score: bool):
    text = """
def train_step(x, y):
    out = model(x, y)
    out.loss.backward()
    return out.loss.item(), out.logits

for x, y in loader:
    loss, logits = train_step(x, y)
    tally(logits, y)
    note(loss, y)
"""
    script = Script(
        text,
        [("for x, y", "next"), ("= model(", "forward"), (".backward", "backward")],
        inside=[("forward", "= model(", "= train_step"), ("backward", ".backward", "= train_step")],
    )
    found = script.roles.results([(FILE, line, "<module>")])
    reached = found is not None and Results(Places(Sources({FILE: text}))).reach(*found)
    assert reached is is_score


BALANCE = """
class Balance:
    def __init__(self):
        self.lean, self.seen = [0.0] * 9, 0

    def weights(self, cells):
        self.seen += len(cells)
        return torch.tensor([1 + self.lean[cell] for cell in cells])

    def update(self, cells, gaps):
        for cell, gap in zip(cells, gaps):
            self.lean[cell] += gap

    def note(self, gaps):
        self.seen += len(gaps)

balance = Balance()
for x, y in loader:
    out = model(x)
    loss = (distance(out, y) * balance.weights(y.tolist())).mean()
    loss.backward()
    balance.update(y.tolist(), (y - out).tolist())
    balance.note((y - out).tolist())
    temper = (y - out).abs().mean().item()
    level = (y - out).abs().max().item()
"""


@pytest.mark.parametrize(
    ("line", "is_score"),
    [("balance.update(y", False), ("balance.note(", True), ("temper =", True), ("level =", True)],
)
def test_what_the_next_loss_is_made_of_is_no_score(line: str, is_score: bool):
    number = 1 + next(n for n, row in enumerate(BALANCE.splitlines()) if line in row)
    assert _is_score(BALANCE, number) is is_score
    tempered = BALANCE.replace(".mean()\n    loss.b", ".mean() / temper\n    loss.b")
    assert _is_score(tempered, number) is (is_score and line != "temper =")
    module = BALANCE.replace("def weights", "def forward").replace("balance.weights(", "balance(")
    assert _is_score(module, number) is is_score, "a module is asked by calling it"
