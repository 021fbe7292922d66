"""What a loop makes of a model's output besides its loss: scores, memories, lists, weights of terms."""

from __future__ import annotations

import pytest

from diagnose.source.places import Places
from diagnose.source.results import Results
from diagnose.source.sources import Sources
from tests.sampled_script import AFTER_FORWARD, PASSES, Script
from tests.test_dependencies import DATA, FORWARD, OTHER

SCORED = """
for x, y in loader:
    hidden = repackage(hidden)
    out, hidden = model(x, hidden)
    hit = out.argmax(1)
    loss = crit(out, y)
    penalty = loss * 2
    total = loss + penalty
    assert out.shape == y.shape
    total.backward()
    note = total.item()
    part = penalty.item()
"""


@pytest.mark.parametrize(
    ("line", "is_score"),
    [(3, False), (5, True), (9, False), (11, False), (12, False)],
)
def test_results_are_neither_the_loss_nor_its_terms_nor_what_the_next_turn_needs(line, is_score):
    script = Script(SCORED, [("for x, y", "next"), ("= model(", "forward"), ("total.back", "backward")])
    found = script.roles.results([("/home/u/train.py", line, "<module>")])
    sources = Sources({"/home/u/train.py": SCORED})
    assert (found is not None and Results(Places(sources)).reach(*found)) is is_score


MEMORY = Script(
    """
    memory = Memory()
    for step in range(9):
        action = actor(state)
        state = world(action)
        memory.push(action)
        x, y = memory.draw()
        out = critic(x)
        loss = crit(out, y)
        loss.backward()
        optimizer.step()
    """,
    [("= actor(", "forward"), ("= critic(", "forward"), *PASSES],
)


def test_a_memory_that_is_made_in_the_function_of_the_loop_is_no_score():
    found = MEMORY.roles.results(MEMORY.stack("memory.push"))
    assert found is None or "memory" in found[2]


def test_what_a_loss_is_called_does_not_make_it_a_metric():
    script = Script(
        """
        def metrics_of(out, y):
            total = crit(out, y)
            hits = accuracy(out, y)
            return total, hits

        for x, y in loader:
            out = model(x)
            loss, hits = metrics_of(out, y)
            loss.backward()
        """,
        [("for x, y", "next"), ("= model(", "forward"), ("loss.backward", "backward")],
    )
    assert script.roles.makes_loss(script.stack("total = crit", "= metrics_of"))
    assert not script.roles.makes_loss(script.stack("hits = accuracy", "= metrics_of"))


def test_a_part_of_a_models_output_may_be_the_loss_and_the_rest_results():
    source = SCORED.replace("loss = crit(out, y)", "loss = out['loss']")
    script = Script(source, [("for x, y", "next"), ("= model(", "forward"), ("total.back", "backward")])
    found = script.roles.results([("/home/u/train.py", 5, "<module>")])
    assert found is not None and Results(Places(Sources({"/home/u/train.py": source}))).reach(*found)


CHUNKED = Script(
    """
    def render(rays):
        parts = []
        for i in range(0, len(rays), 512):
            raw = coarse_net(rays[i : i + 512])
            parts.append(raw)
        raw = cat(parts)
        depth = volume(raw)
        return fine_net(resample(depth))

    for rays in loader:
        colors = render(rays)
        loss = mse(colors, rays)
        loss.backward()
        optimizer.step()
    """,
    [("raw = coarse_net", "forward"), ("return fine_net", "forward"), ("for rays in", "next"), *PASSES],
    inside=[
        ("forward", "raw = coarse_net", "colors = render"),
        ("forward", "return fine_net", "colors = render"),
    ],
)


@pytest.mark.parametrize("line", ["parts.append", "raw = cat", "depth = volume"])
def test_results_that_are_collected_in_a_loop_are_not_the_next_models_batch(line):
    assert CHUNKED.phase(line, "colors = render", slot=AFTER_FORWARD) is FORWARD


WEIGHTED = Script(
    """
    class Trainer:
        def __init__(self):
            self.pacing = Pacing()

        def train_step(self, step, keys, clicks):
            loss = entropy(self.model(keys), clicks)
            loss = loss * self.pacing.throttle(step / 9) + penalty(keys)
            loss.backward()

    class Pacing:
        def throttle(self, now):
            return sum(spend(now))

    def penalty(keys):
        return norm(keys)

    for step, (keys, clicks) in zip(numbers, loader):
        trainer.train_step(step, keys, clicks)
    """,
    [("self.model(keys)", "forward"), ("loss.backward", "backward"), ("for step, (keys", "next")],
    inside=[
        ("forward", "self.model(keys)", "trainer.train_step"),
        ("backward", "loss.backward", "trainer.train_step"),
    ],
)


@pytest.mark.parametrize(("line", "phase"), [("sum(spend(now))", OTHER), ("norm(keys)", FORWARD)])
def test_what_a_loss_is_multiplied_with_may_be_the_loops_own_code(line, phase):
    assert WEIGHTED.phase(line, "loss = loss *", "trainer.train_step", slot=AFTER_FORWARD) is phase


@pytest.mark.parametrize(
    ("told", "phase"),
    [
        ("(kinds % 9).tolist(), losses.tolist()", OTHER),
        ("kinds, losses", FORWARD),
        ("kinds, losses.tolist()", FORWARD),
        ("out[0], out.item()", FORWARD),
        ("losses.tolist()) * fair(losses", FORWARD),
    ],
)
def test_what_weighs_a_loss_by_numbers_alone_is_the_loops_own_code(told, phase):
    script = Script(
        f"""
        class Fairness:
            def __call__(self, *told):
                return spread(told)

        fair = Fairness() if options.fair else None
        for step, (x, y, kinds) in enumerate(loader):
            out = model(x)
            losses = crit(out, y)
            weight = fair({told})
            loss = (tensor(weight) * losses).mean()
            loss.backward()
        """,
        [("for step, (x", "next"), ("= model(", "forward"), ("loss.backward", "backward")],
    )
    line = script.line("return spread")
    stack = [("/home/u/train.py", line, "Fairness.__call__"), *script.stack("weight = fair")]
    assert script.roles.phase(stack, AFTER_FORWARD) is phase


@pytest.mark.parametrize(("told", "phase"), [("step", OTHER), ("out", FORWARD)])
def test_so_it_is_in_the_statement_of_the_backward_pass(told, phase):
    script = Script(
        f"""
        class Office:
            def weight(self, now):
                return sum(self.load(now))

        office = Office()
        for step, (x, y) in enumerate(loader):
            out = model(x)
            (crit(out, y) * office.weight({told})).backward()
        """,
        [("for step, (x", "next"), ("= model(", "forward"), ("(crit(out", "backward")],
    )
    assert script.phase("return sum", "(crit(out", slot=AFTER_FORWARD) is phase
    assert script.phase("(crit(out", slot=AFTER_FORWARD) is FORWARD


def test_what_is_made_of_results_for_the_turns_to_come_is_no_batch_that_anyone_else_could_make():
    script = Script(
        """
        level, trust = 1.0, dict.fromkeys(range(9), 1.0)
        for step in range(9):
            x, y = draw()
            weights = tensor([trust[each] / level for each in y.tolist()])
            out = model(x, weights)
            loss = crit(out, y)
            loss.backward()
            optimizer.step()
            wrong = (out - y).square()
            level = update(trust, dict(zip(y.tolist(), wrong.tolist())))

        def update(trust, recent):
            for each, value in trust.items():
                trust[each] = 0.9 * value + 0.1 / recent.get(each, 1.0)
            return sum(trust.values())
        """,
        [("= model(", "forward"), *PASSES],
    )
    made, updates = "trust[each] = 0.9", "level = update"
    assert script.phase("x, y = draw", slot=AFTER_FORWARD) is DATA
    assert script.phase("weights = tensor", slot=AFTER_FORWARD) is DATA
    assert script.phase(made, updates, slot=AFTER_FORWARD) is OTHER
