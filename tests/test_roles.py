"""Which phase the time between two hooks belongs to, from the source line that was sampled there."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from tests.sampled_script import (
    AFTER_BACKWARD,
    AFTER_DATA_WAIT,
    AFTER_FORWARD,
    AFTER_OPTIMIZER,
    FILE,
    Script,
)

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
