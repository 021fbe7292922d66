"""What a function does for the learning rate alone, in a script that has written its schedule itself."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import CHAIN, HOOK, PYTHON_LOOP, SCHEDULE, SYNC
from diagnose.source.sources import Sources
from tests.marked import FILE, of_marked

RATES = """
def rate_at(step):
    return sum(shape(step, i) for i in range(9))  # inside

for step, x in enumerate(data):
    lr = {}  # made
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss.backward()
    optimizer.step()
    print(step, {})
"""


@pytest.mark.parametrize(
    ("made", "told", "idiom"),
    [
        ("rate_at(step)", "lr", SCHEDULE),
        ("base * rate_at(step)", "lr", SCHEDULE),
        ("rate_at(step) if decays else base", "lr", SCHEDULE),
        ("rate_at(step)", "optimizer.step(lr)", PYTHON_LOOP),
    ],
)
def test_what_makes_a_rate_that_is_only_set_is_a_schedule(made: str, told: str, idiom: str):
    text = RATES.format(made, told)
    stack = [(FILE, 3, "rate_at"), (FILE, 6, "<module>")]
    assert Idioms(Places(Sources({FILE: text}))).of(stack) == (idiom,)
    assert (SCHEDULE in Idioms(Places(Sources({FILE: text}))).of(stack[1:])) is (idiom == SCHEDULE)


def test_what_the_loop_needs_besides_is_no_rate():
    text = RATES.format("base / loss", "loss").replace(
        "loss.backward()", "loss = f(x)  # here\n    loss.backward()"
    )
    assert of_marked(text) == ()


WARMUP = """
def factor(step):
    return sum(shape(step, i) for i in range(9))

for x in data:
    {}
"""


@pytest.mark.parametrize(
    ("line", "schedules", "idioms"),
    [
        ("warmup.step()", True, (SCHEDULE,)),
        ("warmup.step()", False, (HOOK,)),
        ("optimizer.step(); warmup.step()", True, (HOOK,)),
        ("trainer.fit(x)", True, ()),
    ],
)
def test_a_schedule_is_told_by_where_it_was_stepped_whatever_it_is_called(
    line: str, schedules: bool, idioms: tuple[str, ...]
):
    text = WARMUP.format(line)
    found = Idioms(Places(Sources({FILE: text})), {(FILE, 6)} if schedules else ())
    stack = [(FILE, 3, "factor"), (FILE, 6, "fit")]
    assert set(found.of(stack, phase=Phase.OPTIMIZER)) - {PYTHON_LOOP} == set(idioms)
    assert (SCHEDULE in found.of(stack[1:], phase=Phase.OPTIMIZER)) is (idioms == (SCHEDULE,))


KEPT_RATES = """
def rate_at(step):
    return sum(shape(step, i) for i in range(9))

def set_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr

def blend(old, rate):
    return old * rate

def adjust(optimizer, step, x):
    rate = rate_at(step)
    {}
    {}
"""
SETS_RATE = "for group in optimizer.param_groups: group['lr'] = rate"


@pytest.mark.parametrize(
    ("sets", "keeps", "idiom"),
    [
        (SETS_RATE, "return rate", SCHEDULE),
        (SETS_RATE, "self.rate = rate", SCHEDULE),
        (SETS_RATE, "note = {'step': step, 'lr': rate}", SCHEDULE),
        (SETS_RATE, "note['lr'] = rate", SCHEDULE),
        ("set_rate(optimizer, rate)", "pass", SCHEDULE),
        ("set_rate(optimizer, lr=rate)", "return rate", SCHEDULE),
        ("groups = optimizer.param_groups", "for group in groups: group['lr'] = rate", SCHEDULE),
        ("group = optimizer.param_groups[0]", "group['lr'] = rate; return rate", SCHEDULE),
        # What is set is not this, or something is trained with it.
        (SETS_RATE.replace("= rate", "= rate * base"), "return rate", PYTHON_LOOP),
        (SETS_RATE.replace("'lr'", "'seen'"), "return rate", PYTHON_LOOP),
        (SETS_RATE, "optimizer.step(rate)", PYTHON_LOOP),
        (SETS_RATE, "rate.backward()", PYTHON_LOOP),
        ("seen = rate * x; rate = f(x)", SETS_RATE, PYTHON_LOOP),
        ("blend(x, rate)", "return rate", PYTHON_LOOP),
        ("groups = settings.groups", "for group in groups: group['lr'] = rate", PYTHON_LOOP),
    ],
)
def test_what_is_set_as_a_rate_is_one_whatever_else_keeps_it(sets: str, keeps: str, idiom: str):
    stack = [(FILE, 3, "rate_at"), (FILE, 13, "adjust")]
    found = Idioms(Places(Sources({FILE: KEPT_RATES.format(sets, keeps)})))
    assert found.of(stack) == (idiom,)


@pytest.mark.parametrize(
    ("line", "idiom"),
    [
        ("set_rate(optimizer, rate_at(step))", SCHEDULE),
        ("set_rate(optimizer, lr=base * rate_at(step))", SCHEDULE),
        ("blend(x, rate_at(step))", PYTHON_LOOP),
        ("set_rate(rate_at(step), base)", PYTHON_LOOP),
    ],
)
def test_what_is_called_for_a_rate_that_is_given_on_serves_a_schedule(line: str, idiom: str):
    text = KEPT_RATES.replace("rate = rate_at(step)", line).format("pass", "pass")
    stack = [(FILE, 3, "rate_at"), (FILE, 13, "adjust")]
    found = Idioms(Places(Sources({FILE: text})))
    assert found.of(stack) == (idiom,)
    assert found.of(stack[1:]) == ()


def test_a_schedule_that_adds_up_in_a_loop_is_one():
    loop = "for i in r:\n        total += math.sin(step * i) * 1e-4"
    text = KEPT_RATES.replace("return sum(shape(step, i) for i in range(9))", loop)
    stack = [(FILE, 4, "rate_at"), (FILE, 14, "adjust")]
    for last, idioms in (("return rate", (SCHEDULE,)), ("optimizer.step(rate)", (PYTHON_LOOP, CHAIN))):
        assert Idioms(Places(Sources({FILE: text.format(SETS_RATE, last)}))).of(stack) == idioms


RANKS = """
class Warmup:
    def {name}({first}, value):
        for group in {first}.param_groups:
            group["lr"] = value

def rank_rows(out, y):
    for row, right in zip(out, y):
        ranks.append(sorted(row).index(right))
    return ranks

for out, y in data:
    ranks = rank_rows(out, y)
    {call}(ranks)
"""


@pytest.mark.parametrize(
    ("name", "call", "schedules"),
    [
        ("update", "tracker.update", False),
        ("step", "tracker.step", False),
        ("update", "update", False),
        ("set_lr", "warmup.set_lr", True),
        ("adjust_learning_rate", "warmup.adjust_learning_rate", True),
    ],
)
@pytest.mark.parametrize("in_call", [False, True])
def test_a_method_is_known_to_set_a_rate_where_its_name_says_so(
    name: str, call: str, schedules: bool, in_call: bool
):
    text = RANKS.format(name=name, first="self", call=call)
    if in_call:
        text = text.replace("ranks = rank_rows(out, y)\n", "pass\n").replace(
            "(ranks)\n", "(rank_rows(out, y))\n"
        )
    stack = [(FILE, 9, "rank_rows"), (FILE, 14 if in_call else 13, "<module>")]
    assert (SCHEDULE in Idioms(Places(Sources({FILE: text}))).of(stack)) is schedules


@pytest.mark.parametrize(
    ("call", "schedules"), [("update", True), ("tracker.update", False), ("self.tracker.update", False)]
)
def test_a_function_that_sets_a_rate_is_no_method_of_that_name(call: str, schedules: bool):
    text = RANKS.format(name="update", first="optimizer", call=call).replace(
        "(ranks)", "(optimizer, ranks)"
    )
    found = Idioms(Places(Sources({FILE: text.replace("class Warmup:", "if True:")})))
    assert (SCHEDULE in found.of([(FILE, 9, "rank_rows"), (FILE, 13, "<module>")])) is schedules


def test_a_rate_that_is_an_attribute_of_its_schedule_is_one():
    text = """
class Warmup:
    def step(self):
        self.lr = self.rate_at(self.num)  # here
        for group in self.optimizer.param_groups:
            group["lr"] = {}
"""
    assert of_marked(text.format("self.lr")) == (SCHEDULE,)
    assert of_marked(text.format("self.base")) == ()


@pytest.mark.parametrize("waits", [False, True])
def test_a_schedule_that_reads_numbers_of_a_tensor_is_one_where_that_waits_for_nothing(waits: bool):
    text = """
def factor(step):
    for i in range(9):
        total += float(curve[i])
    return total

for x in data:
    {}
"""
    stack = [(FILE, 4, "factor"), (FILE, 8, "fit")]
    for caller, idiom in (("warmup.step()", SYNC if waits else SCHEDULE), ("factor(x)", SYNC)):
        stepped = {(FILE, 8)} if "step" in caller else set()
        found = Idioms(Places(Sources({FILE: text.format(caller)})), stepped)
        assert found.of(stack, waits=waits) == (idiom,)
