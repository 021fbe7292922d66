"""What is forward of a loss that is put together elsewhere: in lists, methods, modules and functions."""

from __future__ import annotations

from diagnose.core.phases import Phase
from tests.sampled_script import AFTER_DATA_WAIT, AFTER_FORWARD, AFTER_OPTIMIZER, PASSES, Script

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


OF_A_LIST_OF_WEIGHTS = Script(
    """
    def flow(weights, x):
        near = linear(x, weights["near"])
        return relu(near)

    left = 100
    while left > 0:
        pick = randint(len(rows), (64,))
        loss = (flow(weights, rows[pick]) - wanted[pick]).square().mean()
        loss.backward()
        optimizer.step()
        left -= 1
    """,
    PASSES,
)


def test_where_nobody_sees_a_batch_what_makes_the_loss_is_all_of_the_forward_pass():
    assert OF_A_LIST_OF_WEIGHTS.phase("near = ", "loss = ", slot=AFTER_OPTIMIZER) is Phase.FORWARD
