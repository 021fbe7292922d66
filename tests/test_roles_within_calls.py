"""Whose the time is that passes in a statement that calls a model, before or after the call."""

from __future__ import annotations

from diagnose.core.phases import Phase
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from tests.sampled_script import AFTER_BACKWARD, AFTER_FORWARD, AFTER_OPTIMIZER, FILE, Script


def test_a_batch_made_by_a_loop_in_the_models_own_argument_is_waiting_for_data():
    """Before Python 3.12 a comprehension is a function. One that calls the model makes no batch."""
    script = Script(
        """
        for step in range(9):
            out = model(tensor([[code[w] for w in t.split()] for t in texts]))
            loss = criterion(out, y)
            loss.backward()
        """,
        [("= model(", "forward"), ("loss.backward", "backward")],
    )
    for function in ("train.<locals>.<listcomp>", "<genexpr>"):
        stack = [(FILE, script.line("= model("), function), *script.stack("= model(")]
        assert script.roles.phase(stack, AFTER_BACKWARD) is Phase.DATA_WAIT
        assert script.roles.phase(stack, AFTER_FORWARD) is Phase.FORWARD, "sum(model(x) for x in parts)"
    assert script.phase("= model(", slot=AFTER_BACKWARD) is Phase.FORWARD
    place = FILE, script.line("= model(")
    sites = [
        ("forward", *place, "train.<locals>.<listcomp>", 1),
        ("backward", FILE, place[1] + 2, "train", 1),
    ]
    roles = Roles(sites, Sources({FILE: "\n".join(script.lines)}))
    stack = [(*place, "train.<locals>.<listcomp>"), (*place, "train")]
    assert roles.phase(stack, AFTER_BACKWARD) is Phase.FORWARD


IN_ONE_LINE = Script(
    """
    def featurize(texts):
        return encode(texts)

    for texts, y in batches:
        cross_entropy(model(featurize(texts)), y).backward()
        optimizer.step()
    """,
    [("model(", "forward"), ("model(", "backward"), ("optimizer.step", "optimizer")],
)


def test_a_batch_made_in_one_line_with_its_backward_is_waiting_for_data():
    assert IN_ONE_LINE.phase("return encode", "model(", slot=AFTER_OPTIMIZER) is Phase.DATA_WAIT
    # Who knows what a package calls after the backward pass that it began.
    assert IN_ONE_LINE.phase("return encode", "model(", slot=AFTER_BACKWARD) is Phase.OTHER
    assert IN_ONE_LINE.phase("model(", slot=AFTER_OPTIMIZER) is Phase.OTHER


def test_what_a_trainer_calls_back_is_not_its_batch():
    kinds = ("next", "forward", "backward", "optimizer")
    text = """
        def on_step(trainer):
            note(trainer)

        trainer.train()
        """
    script = Script(text, [("trainer.train()", kind) for kind in kinds])
    assert script.phase("note(trainer)", "trainer.train()", slot=AFTER_OPTIMIZER) is Phase.OTHER


PENALTIES = Script(
    """
    def l2_penalty(net):
        return sum(p.square().sum() for p in net.parameters())

    def shrink(p):
        return p.abs().sum()

    for x, y in batches:
        loss = 1e-4 * sum(shrink(p) for p in model.parameters()) + criterion(model(x), y)
        loss.backward()
        (l2_penalty(net) + criterion(net(x), y)).backward()
        optimizer.step()
    """,
    [
        *(("loss = ", "forward"), ("net(x)", "forward"), ("loss.backward", "backward")),
        *(("net(x)", "backward"), ("optimizer.step", "optimizer")),
    ],
)


def test_a_penalty_of_the_weights_in_a_models_line_is_no_batch():
    loop = (FILE, PENALTIES.line("loss = "), "<genexpr>")
    outer = PENALTIES.stack("loss = ")
    for inner in ([], PENALTIES.stack("p.abs()")):
        assert PENALTIES.roles.phase([*inner, loop, *outer], AFTER_OPTIMIZER) is Phase.FORWARD
    penalty = PENALTIES.stack("p.square()")
    turn = [(*penalty[0][:2], "l2_penalty.<locals>.<genexpr>")]
    line = PENALTIES.stack("net(x)")
    for inner in (penalty, turn + penalty):
        assert PENALTIES.roles.phase([*inner, *line], AFTER_OPTIMIZER) is Phase.OTHER
