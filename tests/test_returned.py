"""Which of the things that a function of the loop returns are the loss: its callers show it."""

from __future__ import annotations

from textwrap import dedent

import pytest

from diagnose.core.phases import Phase
from diagnose.source.places import Places
from diagnose.source.results import Results
from diagnose.source.sources import Sources
from tests.sampled_script import AFTER_FORWARD, AFTER_OPTIMIZER, FILE, PASSES, Script

FORWARD, OTHER = Phase.FORWARD, Phase.OTHER

HELPER = """
    def run(x, y):
        out = model(x)
        loss = focal(out, y)
        hits = judge(out, y)
        {returned}

    for x, y in loader:
        {called}
        {passed}.backward()
        optimizer.step()
"""


def helper(returned: str, called: str, passed: str = "loss") -> tuple[Script, str]:
    source = dedent(HELPER).format(returned=returned, called=called, passed=passed)
    script = Script(
        source,
        [("for x, y", "next"), ("= model(x)", "forward"), (".backward()", "backward"), PASSES[1]],
        inside=[("forward", "= model(x)", called)],
    )
    return script, source


def scores(script: Script, source: str, *parts: str) -> bool:
    found = script.roles.results(script.stack(*parts))
    return found is not None and Results(Places(Sources({FILE: source}))).reach(*found)


@pytest.mark.parametrize(
    ("returned", "called", "passed"),
    [
        ("return loss, hits", "loss, h = run(x, y)", "loss"),
        ("return loss, hits.item()", "loss, h = run(x, y)", "loss"),
        ("return hits, loss", "h, loss = run(x, y)", "loss"),
        ("return [loss, hits]", "got = run(x, y)", "got[0]"),
        ("return {'loss': loss, 'hits': hits.item()}", "got = run(x, y)", "got['loss']"),
        ("return {'goal': loss, 'hits': hits}", "got = run(x, y)", "got['goal']"),
        ("return dict(goal=loss, hits=hits)", "goal = run(x, y)['goal']", "goal"),
        ("both = {'goal': loss, 'hits': hits}; return both", "got = run(x, y)", "got['goal']"),
        ("both = {'goal': loss}; both['hits'] = hits; return both", "got = run(x, y)", "got['goal']"),
        ("return (loss, hits) if y else (loss, None)", "loss, h = run(x, y)", "loss"),
    ],
)
def test_of_what_a_helper_returns_only_what_gets_to_a_backward_is_the_loss(returned, called, passed):
    script, source = helper(returned, called, passed)
    assert script.phase("loss = focal", called, slot=AFTER_FORWARD) is FORWARD
    assert not scores(script, source, "loss = focal", called)
    assert script.phase("hits = judge", called, slot=AFTER_FORWARD) is OTHER
    assert scores(script, source, "hits = judge", called)


@pytest.mark.parametrize(
    ("returned", "called", "passed"),
    [
        ("return loss, hits", "loss, h = run(x, y); loss = loss + h", "loss"),
        ("return loss, hits", "loss = sum(run(x, y))", "loss"),
        ("return {'a': loss, 'b': hits}", "got = run(x, y); loss = sum(got.values())", "loss"),
        ("return [loss, hits]", "got = run(x, y); loss = got[0] + got[1]", "loss"),
        ("return loss + hits", "loss = run(x, y)", "loss"),
    ],
)
def test_all_that_gets_to_a_backward_is_the_loss(returned, called, passed):
    script, _ = helper(returned, called, passed)
    for part in ("loss = focal", "hits = judge"):
        assert script.phase(part, called, slot=AFTER_FORWARD) is FORWARD


LAYERS = Script(
    """
    class Task:
        def shared(self, batch):
            x, y = batch
            out = self.net(x)
            goal = crit(out, y)
            quality = judge(out, y)
            return goal, quality

        def training_step(self, batch):
            goal, quality = self.shared(batch)
            self.log("quality", quality)
            return goal
    """,
    [("self.net(x)", "forward")],
    inside=[("forward", "self.net(x)", "= self.shared(batch)")],
)


def test_a_function_that_returns_the_loss_in_turn_shows_which_it_is():
    def phase(part: str) -> Phase:
        return LAYERS.phase(part, "= self.shared(batch)", slot=AFTER_FORWARD)

    assert phase("goal = crit") is FORWARD
    assert phase("quality = judge") is OTHER


RECURRENT = Script(
    """
    def run(x, y, hidden):
        out, hidden = model(x, hidden)
        loss = crit(out, y)
        hidden = repackage(hidden)
        return loss, hidden

    for x, y in loader:
        loss, hidden = run(x, y, hidden)
        loss.backward()
        optimizer.step()
    """,
    [("for x, y", "next"), ("= model(x", "forward"), *PASSES],
    inside=[("forward", "= model(x", "= run(x")],
)


def test_what_the_next_turn_needs_is_no_score():
    assert RECURRENT.phase("hidden = repackage", "= run(x", slot=AFTER_FORWARD) is not OTHER


ROLLOUT = Script(
    """
    def act(state):
        scores = policy(state)
        chosen = explore(scores)
        chances = scores.log_softmax(1)
        value = spread(scores)
        return chosen, chances, value

    for step in range(9):
        for _ in range(64):
            chosen, chances, value = act(state)
            state, reward = env.step(chosen)
            memory.add(state, chosen, chances, value)
        for part in memory:
            out = policy(part)
            loss = crit(out, part)
            loss.backward()
            optimizer.step()
    """,
    [("scores = policy", "forward"), ("out = policy", "forward"), *PASSES],
    inside=[("forward", "scores = policy", "= act(state)")],
)


@pytest.mark.parametrize("part", ["chosen = explore", "chances = scores", "value = spread"])
def test_what_a_memory_is_given_is_none_of_the_scores(part):
    assert ROLLOUT.phase(part, "= act(state)", slot=AFTER_FORWARD) is not OTHER


UNSEEN = """
    def training_step(batch):
        x, y = batch
        out = model(x)
        loss = crit(out, y)
        pred = out.argmax(1)
        hits = judge(pred, y)
        {returned}
"""


@pytest.mark.parametrize(
    ("returned", "phase"),
    [
        ("return loss, hits", OTHER),
        ("return {'loss': loss, 'hits': hits}", OTHER),
        ("return {'loss': loss, 'hits': hits.item()}", OTHER),
        ("return hits, pred", FORWARD),
        ("return hits", FORWARD),
    ],
)
def test_without_a_caller_what_has_no_gradients_is_no_loss_beside_what_has(returned, phase):
    source = UNSEEN.replace("judge(pred, y)", "(pred == y).sum()").format(returned=returned)
    script = Script(source, [("= model(x)", "forward")])
    assert script.phase("hits = ", slot=AFTER_FORWARD) is phase


SEVERAL_LINES = Script(
    """
    def run(x, y):
        out = model(x)
        return {
            "loss": crit(out, y),
            "hits": judge(out, y),
        }

    for x, y in loader:
        got = run(x, y)
        got["loss"].backward()
        optimizer.step()
    """,
    [("for x, y", "next"), ("= model(x)", "forward"), (".backward()", "backward"), PASSES[1]],
    inside=[("forward", "= model(x)", "got = run")],
)


def test_the_lines_of_a_loss_are_told_from_those_of_what_is_returned_beside_it():
    assert SEVERAL_LINES.phase("crit(out, y)", "got = run", slot=AFTER_FORWARD) is FORWARD
    assert SEVERAL_LINES.phase("judge(out, y)", "got = run", slot=AFTER_FORWARD) is OTHER


PUT_ASIDE = """
    class Trainer:
        def training_step(self, batch):
            x, y = batch
            out = self.net(x)
            pred = out.argmax(1)
            for t, p in zip(y, pred):
                self.confusion[t, p] += 1
            self.right += (pred == y).sum()
            self.chances.append(out.log_softmax(1))
            return cross_entropy(out, y)

        def fit(self):
            for batch in self.loader:
                loss = self.training_step(batch)
                loss.backward()
                self.optimizer.step()
"""


@pytest.mark.parametrize("part", ["pred = ", "for t, p", "self.confusion[", "self.right +="])
def test_what_has_no_gradients_is_put_aside_for_no_loss(part):
    sites = [("for batch", "next"), ("self.net(", "forward"), *PASSES]
    script = Script(PUT_ASIDE, sites, inside=[("forward", "self.net(", "= self.training_step")])
    assert script.phase(part, "= self.training_step", slot=AFTER_FORWARD) is OTHER
    assert scores(script, dedent(PUT_ASIDE), part, "= self.training_step")
    assert script.phase("self.chances", "= self.training_step", slot=AFTER_FORWARD) is FORWARD


TRAINED_INSIDE = """
    def train_step(x, y):
        logits = model(x)
        loss = crit(logits, y)
        loss.backward()
        optimizer.step()
        {returned}

    for x, y in loader:
        {called}
        tally({logits}, y)
        note({loss}, y)
"""


@pytest.mark.parametrize(
    ("returned", "called", "logits", "loss"),
    [
        ("return logits.detach(), loss", "logits, loss = train_step(x, y)", "logits", "loss"),
        ("return {'l': loss.item(), 'o': logits}", "got = train_step(x, y)", "got['o']", "got['l']"),
        ("return logits", "logits = train_step(x, y)", "logits", "lr"),
    ],
)
def test_results_come_back_from_a_function_that_trains(returned, called, logits, loss):
    source = dedent(TRAINED_INSIDE).format(returned=returned, called=called, logits=logits, loss=loss)
    script = Script(
        source,
        [("for x, y", "next"), ("= model(x)", "forward"), *PASSES],
        inside=[("forward", "= model(x)", called), ("backward", "loss.backward", called)],
    )
    assert script.phase("tally(", slot=AFTER_OPTIMIZER) is OTHER
    assert scores(script, source, "tally(")
    assert not scores(script, source, "note(")


OF_ONE_NAME = Script(
    """
    class Trainer:
        def step(self, x, y):
            out = self.net(x)
            loss = crit(out, y)
            hits = judge(out, y)
            return loss, hits

    class World:
        def step(self, action):
            return action, 0

    def play():
        for turn in range(9):
            seen, reward = world.step(turn)
            (head(turn) * reward).backward()
    """,
    [("= self.net(x)", "forward"), ("head(turn)", "forward"), ("head(turn)", "backward")],
)


def test_another_function_of_the_same_name_does_not_tell_what_is_wanted():
    for part in ("loss = crit", "hits = judge"):
        assert OF_ONE_NAME.phase(part, slot=AFTER_FORWARD) is FORWARD
