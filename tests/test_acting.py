"""Who steps an environment that is a function, or whose own functions are called as an evaluation."""

from __future__ import annotations

import ast

import pytest

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import ENVIRONMENT, ROLLOUT
from diagnose.source.simulators import simulators_of
from diagnose.source.sources import Sources
from tests.sampled_script import AFTER_FORWARD, PASSES, Script

FILE = "/train.py"


def of_stack(text: str, *frames: tuple[str, str]) -> str:
    """What a stack in the evaluation serves: of each frame, innermost first, a part of its line, and the
    function. Empty where it neither steps an environment nor acts in one."""
    rows = text.splitlines()
    stack = [
        (FILE, 1 + next(i for i, row in enumerate(rows) if part in row), function)
        for part, function in frames
    ]
    idiom = Idioms(Places(Sources({FILE: text}))).of(stack, phase=Phase.EVALUATION)
    return next((each for each in idiom if each in (ENVIRONMENT, ROLLOUT)), "")


FUNCTIONAL = """
def env_step(state, action):
    place, speed = state
    speed = speed + pushed(action)
    return (place + speed, speed), -place.abs(), place.abs() > 2

def pushed(action):
    return 0.1 * torch.where(action > 0, 1.0, -1.0)

def collect(policy, state, buffer):
    with torch.no_grad():
        for t in range(64):
            action = Categorical(logits=policy(state)).sample()
            state, reward, done = env_step(state, action)
            buffer.append((state, action, reward))
"""


def acting_in(text: str) -> list[str]:
    """What the environment's function, the line that asks it, and the one where the policy acts, serve."""
    asks = (
        next(row.strip() for row in text.splitlines() if "_step(" in row and "def" not in row),
        "collect",
    )
    return [
        of_stack(text, ("speed = speed + pushed", "env_step"), asks),
        of_stack(text, asks),
        of_stack(text, ("action = Categorical", "collect")),
    ]


def test_an_environment_may_be_a_function_of_state_and_action():
    assert acting_in(FUNCTIONAL) == [ENVIRONMENT, ENVIRONMENT, ROLLOUT]
    two = FUNCTIONAL.replace("state, reward, done =", "state, reward =")
    assert acting_in(two) == [ENVIRONMENT, ENVIRONMENT, ROLLOUT]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("speed = speed + pushed(action)", "speed = speed + pushed(net(state))"),  # a model imagines it
        ("return 0.1 * torch", "return head(action) * torch"),  # as does what it calls
        ("speed = speed + pushed(action)", "speed = speed + pushed(model.predict(action))"),
        ("env_step(", "train_step("),
        ("env_step(", "optimizer_sim_step("),
        ("state, reward, done =", "state, loss, hits ="),
        ("env_step(state, action)", "env_step(policy, state)"),  # it acts itself
        ("env_step(state, action)", "env_step(state)"),
        ("state, reward, done = env_step(state, action)", "state, t, done = env_step(state, dt)"),
    ],
)
def test_a_function_that_learns_imagines_or_only_computes_is_no_environment(old, new):
    text = FUNCTIONAL.replace(old, new)
    assert text != FUNCTIONAL
    assert acting_in(text) == ["", "", ""]


LEARNING = """
while update < steps:
    rewards, values = [], []
    for _ in range(24):
        logits, value = policy(seen)
        move = Categorical(logits=logits).sample()
        seen, reward = env_step(seen, move)
        rewards.append(reward)
        values.append(value)
    loss = (stack(rewards) - stack(values)).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("called", "is_one"), [("env_step", True), ("unroll", False)])
def test_such_a_function_is_an_environment_of_a_loop_that_learns_with_gradients(called, is_one):
    text = f"def {called}(seen, move):\n    return seen + move, -seen.abs()\n{LEARNING}"
    script = Script(text.replace("env_step", called), [("= policy(", "forward"), *PASSES])
    assert script.phase("seen, reward =", slot=AFTER_FORWARD) is Phase.DATA_WAIT
    assert script.roles.acts(script.stack("seen, reward =")) is is_one


DIFFERENTIABLE = """
def dynamics(state, action):
    q, v = state
    v = v + 0.05 * (action - torch.sin(q))
    return (q, v), -(q.square() + 0.1 * v.square()).mean()

for step in range(1000):
    state, total = start(state), 0.0
    for t in range(50):
        action = policy(obs(state))
        state, reward = dynamics(state, action)
        total = total + reward
    (-total).backward()
    optimizer.step()
"""


def through_dynamics(text: str) -> tuple[Phase, bool, bool]:
    """The phase of the line that asks a simulation, whether it is taken for an environment by the roles of
    lines, and by their idioms."""
    script = Script(text, [("policy(", "forward"), ("backward()", "backward"), PASSES[1]])
    inside, stack = script.stack("v = v +"), script.stack("state, reward =")
    phase = script.phase("state, reward =", slot=AFTER_FORWARD)
    found = Idioms(Places(Sources({FILE: text})))
    stacks = [[(FILE, *row[1:]) for row in rows] for rows in (stack, [*inside, *stack])]
    idioms = {ENVIRONMENT in found.of(each, phase=phase) for each in stacks}
    assert len(idioms) == 1
    return phase, script.roles.acts(stack), idioms.pop()


@pytest.mark.parametrize(
    ("action", "is_environment"),
    [
        ("policy(obs(state))", False),
        ("Normal(*policy(obs(state))).rsample()", False),
        ("Normal(*policy(obs(state))).sample()", True),
        ("policy(obs(state)).detach()", True),
        ("policy(obs(state)).argmax(-1)", True),
    ],
)
def test_what_passes_on_the_gradients_of_an_action_is_no_environment(action: str, is_environment: bool):
    text = DIFFERENTIABLE.replace("policy(obs(state))", action)
    through = (Phase.DATA_WAIT, True, True) if is_environment else (Phase.FORWARD, False, False)
    assert through_dynamics(text) == through
    short = text.replace("start(state)", "tuple(each.detach() for each in state)")
    assert through_dynamics(short) == through


def test_an_action_may_be_drawn_by_a_function():
    choose = "def choose(policy, seen):\n    return Categorical(policy(seen)).sample()  # drawn\n"
    text = choose + DIFFERENTIABLE.replace("policy(obs(state))", "choose(policy, obs(state))")
    sites = [("choose(policy, obs", "forward"), ("backward()", "backward"), PASSES[1]]
    assert Script(text, sites).roles.acts(Script(text, sites).stack("state, reward =")) is True
    through = text.replace(".sample()", ".rsample()")
    assert Script(through, sites).roles.acts(Script(through, sites).stack("state, reward =")) is False


POLICY = """
class Policy(nn.Module):
    def forward(self, seen):
        spread = Categorical(logits=self.net(seen))
        action = spread.sample()  # drawn
        return action, spread.log_prob(action)

def act(seen):
    return asked(seen)

def asked(seen):
    return policy(seen)
"""


@pytest.mark.parametrize("asks", ["policy", "act"])
def test_an_action_may_be_drawn_in_the_forward_of_a_policy(asks: str):
    text = POLICY + DIFFERENTIABLE.replace(
        "action = policy(obs(state))", f"action, logp = {asks}(obs(state))"
    )
    sites = [(f"= {asks}(obs", "forward"), ("backward()", "backward"), PASSES[1]]
    assert Script(text, sites).roles.acts(Script(text, sites).stack("state, reward =")) is True
    through = text.replace(".sample()", ".rsample()")
    assert Script(through, sites).roles.acts(Script(through, sites).stack("state, reward =")) is False


def test_what_is_surely_no_model_may_be_asked_by_a_simulation():
    text = """
from math import sin

class State:
    def simulate(self, action):
        return self.net(action)

def simulate(state, action):
    return State(sin(state.place) + F.one_hot(action).float().sum()), len(state.others)

def dynamics(z, action):
    return rnn(torch.cat([z, action], 1))

def transition(layers, z):
    return layers[0](z)

def sim_reset():
    return State(0)
"""
    assert simulators_of(ast.parse(text)) == {"simulate", "sim_reset"}


@pytest.mark.parametrize(
    "simulate",
    [
        "def simulate(z, action):\n    return predict_next(z, action)",
        "def simulate(z, action):\n    return dreams.following(z, action)",
        "def simulate(params, z, a):\n    h = torch.tanh(z @ params.w1)\n    return h, h @ params.w_r",
        "def simulate(z, *, wm_params):\n    return z @ wm_params[0]",
        "def simulate(z, a):\n    return functional_call(wm, held, (z, a))",
        "def simulate(z, a):\n    return torch.utils.checkpoint.checkpoint(rnn, z, a)",
        "def simulate(z, a):\n    return reduce(world_model, a, z)",
    ],
)
def test_a_simulation_by_what_is_imported_or_of_weights_may_be_imagined(simulate):
    imports = """
import torch.utils.checkpoint
import dreams
from functools import reduce
from torch.func import functional_call
from world_model import predict_next
"""
    assert not simulators_of(ast.parse(imports + simulate))
    surely = "def simulate(z, env_params):\n    return torch.tanh(z) * env_params.scale"
    assert simulators_of(ast.parse(imports + surely)) == {"simulate"}


BOARD = """
class Board:
    def step(self, move):
        self.validate_move(move)
        value = self.evaluate()
        return self.squares, value, self.over

    def evaluate(self):
        return sum(map(worth, self.squares))

def collect(policy, board, rows):
    for _ in range(99):
        action = policy(seen)
        value = critic.evaluate(seen, action)
        seen, reward, done = board.step(action)
        rows.append((seen, reward))

def evaluate(policy, board):
    while not done:
        action = policy(seen)
        seen, reward, done = board.step(action)
"""
INSIDE = (("return sum(map", "Board.evaluate"), ("value = self.evaluate", "Board.step"))
STEPS = ("seen, reward, done = board", "collect")


def test_what_an_environment_does_inside_may_be_called_an_evaluation():
    assert of_stack(BOARD, *INSIDE, STEPS, ("for _ in", "main")) == ENVIRONMENT


def test_who_steps_an_environment_to_measure_does_not_collect():
    for outer in ("validate", "test_policy"):
        assert of_stack(BOARD, *INSIDE, STEPS, ("for _ in", outer)) == "", outer
        assert of_stack(BOARD, STEPS, ("for _ in", outer)) == "", outer
    assert of_stack(BOARD, ("action = policy", "evaluate"), ("for _ in", "main")) == ""
    assert of_stack(BOARD, *INSIDE, ("for _ in", "Runner.evaluate")) == ""


def test_a_policy_may_evaluate_what_it_has_chosen_while_it_collects():
    critic = ("return sum(map", "Critic.evaluate")
    assert of_stack(BOARD, critic, ("value = critic", "collect"), ("for _ in", "main")) == ROLLOUT
    scoring = BOARD.replace("critic.evaluate(seen, action)", "evaluate(net, held_out)")
    assert of_stack(scoring, critic, ("value = evaluate", "collect"), ("for _ in", "main")) == ""


def test_an_evaluation_beside_a_step_is_no_part_of_it():
    text = BOARD.replace("action = policy(seen)", "action = evaluate(policy, env.reset())")
    assert of_stack(text, ("return sum(map", "evaluate"), ("action = evaluate", "collect")) == ""
    now_and_then = BOARD.replace(
        "value = self.evaluate()", "if self.t % 100 == 0:\n            value = self.evaluate()"
    )
    assert of_stack(now_and_then, *INSIDE, ("for _ in", "main")) == ""


GAME = """
def collect(agent, game, rows):
    for _ in range(64):
        move = agent.act(game.view())
        game.play(move)
        rows.append((game.view(), move, game.score()))
"""


def test_what_is_called_an_environment_may_be_told_in_other_words_than_step():
    assert of_stack(GAME, ("game.play", "collect")) == ENVIRONMENT
    assert of_stack(GAME, ("move = agent.act", "collect")) == ROLLOUT
    for other in ("piano.play(move)", "eval_game.play(move)", "game.note(move)"):
        assert of_stack(GAME.replace("game.play(move)", other), (other, "collect")) == ""
    unchosen = GAME.replace("agent.act(", "agent.encode(")
    assert of_stack(unchosen, ("game.play", "collect")) == ""


@pytest.mark.parametrize(
    "other",
    [
        "env_pool.push(view, move, reward)",
        "self.env_memory.push(view, move)",
        "game_history.push(move)",
        "world_model.advance(feat, move)",
        "self.world_model.step(feat, move)",
        "self.world_models[k].step(feat, move)",
        'self.nets["world_model"].step(feat, move)',
        "env_buffers[k].push(view, move)",
        "world_models[order[k]].advance(feat, move)",
        "env_pools[self.k].pool.push(view, move)",
    ],
)
def test_what_keeps_the_answers_of_an_environment_or_imagines_them_is_none(other: str):
    assert of_stack(GAME.replace("game.play(move)", other), (other, "collect")) == ""


def test_an_environment_may_be_called_by_what_acts_in_it():
    for other in (
        *("policy_env.perform(move)", "self.actor.env.play(move)", "env_pool.perform(move)"),
        *("self.envs[k].push(move)", "game_envs[actor].step(move)"),
    ):
        assert of_stack(GAME.replace("game.play(move)", other), (other, "collect")) == ENVIRONMENT
    for other, is_one in (
        ("seen, reward, done = model.step(move)", True),
        ("feat = world_model.reset()", False),
        ("seen = model_env.reset()", True),
    ):
        assert (of_stack(other, (other, "train")) == ENVIRONMENT) is is_one


@pytest.mark.parametrize("function", ["benchmark", "run_benchmark", "benchmark_ppo"])
def test_who_trains_may_do_so_for_a_benchmark(function: str):
    text = f"""
def {function}(cfg):
    for _ in range(cfg.steps):
        with torch.no_grad():
            action = policy(seen)
        seen, reward, done, info = env.step(action)
        loss = advantage(reward)
        loss.backward()
        optimizer.step()
"""
    assert of_stack(text, ("env.step", function), ("def ", "main")) == ENVIRONMENT
    assert of_stack(text, ("action = policy", function), ("def ", "main")) == ROLLOUT


@pytest.mark.parametrize(
    "judge",
    [
        "evaluate(policy, eval_env, num_actions)",
        "self.trainer.evaluate(policy, num_actions)",
        "runner.evaluate(policy, num_actions)",
    ],
)
def test_an_evaluation_that_is_told_how_many_actions_there_are_judges_none(judge: str):
    text = BOARD.replace("critic.evaluate(seen, action)", judge)
    assert of_stack(text, ("return sum(map", "evaluate"), (judge, "collect"), ("for _ in", "main")) == ""
