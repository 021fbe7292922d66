"""What a line is for in a loop that acts: environments, policies, and packages that learn by acting."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.purposes import ENVIRONMENT, PYTHON_LOOP, ROLLOUT
from tests.marked import of_marked

ACTING = """
class Pole:
    def step(self, action):
        self.x += self.v * 0.02  # here

def collect(envs, policy):
    for t in range(128):
        with torch.no_grad():
            action = policy(obs)  # by act
        obs, reward, done, info = envs.step(action)  # by collect
"""


def test_inside_an_environment_everything_is_its_step():
    for phase in (Phase.OTHER, Phase.DATA_WAIT, Phase.EVALUATION):
        assert of_marked(ACTING, "Pole.step", "collect", "main", phase=phase) == (ENVIRONMENT,)


@pytest.mark.parametrize(
    ("statement", "is_one"),
    [
        ("obs, reward, done, truncated, info = self.envs.step(action.cpu().numpy())", True),
        ("obs, reward, done = pole.step(action)", True),
        ("following, reward = house.step(action)", True),
        ("result = env.step(action)", True),
        ("obs, _ = env.reset()", True),
        ("seen, gained = game.send(move)", True),
        ("connection.send(move)", False),
        ("MPI.COMM_WORLD.send(rows, dest=1)", False),
        ("rows = MPI.COMM_WORLD.recv(source=0)", False),
        ("optimizer.step()", False),
        ("env_optimizer.step()", False),
        ("scaler.step(optimizer)", False),
        ("loss = optimizer.step(closure)", False),
        ("out, hidden = cell.step(x, hidden)", False),
        ("obs, reward, done, info = eval_env.step(action)", False),
        ("loss, logits, accuracy = model.step(x, y)", False),
        ("results = [e.step(a) for e, a in zip(envs, action)]", True),
        ("results = [e.step(a) for i, e in enumerate(self.envs)]", True),
        ("for e in list(envs.values()): e.reset()", True),
        ("for name, e in envs.items(): e.step(0)", True),
        ("results = [o.step() for o in world.optimizers]", False),
        ("results = [o.step() for o in range(env.size)]", False),
        ("results = [e.step(a) for e, a in zip(eval_envs, action)]", False),
    ],
)
def test_an_environment_is_told_by_its_name_or_by_what_its_step_returns(statement, is_one):
    assert (ENVIRONMENT in of_marked(f"{statement}  # here")) is is_one


PLANS = """
def nights(self, depot):
    while True:
        plan = self.act(depot.observe()) if eager else 0
        yield plan, *depot.step(plan)  # here
"""


def test_what_is_stepped_with_what_a_policy_chose_is_an_environment():
    assert of_marked(PLANS, "nights", "main", phase=Phase.EVALUATION) == (ENVIRONMENT,)
    acting = PLANS.replace("  # here", "").replace("else 0", "else 0  # here")
    assert of_marked(acting, "nights", "main", phase=Phase.EVALUATION) == (ROLLOUT,)
    by_one = PLANS.replace(
        "yield plan, *depot.step(plan)", "yield [d.step(p) for d, p in zip(depots, plan)]"
    )
    assert of_marked(by_one, "nights", "main", phase=Phase.EVALUATION) == (ENVIRONMENT,)
    assert of_marked(PLANS.replace("act(", "encode("), "nights", "main", phase=Phase.EVALUATION) == ()


def test_an_environment_that_a_package_steps_is_told_by_what_it_returns():
    text = "def step(self, a):\n    x = f(a)  # here\n    return x, reward, False, {}\n"
    assert of_marked(text, "Pole.step", "main", phase=Phase.EVALUATION) == (ENVIRONMENT,)
    text = text.replace("reward, False, {}", "loss, hits")
    assert of_marked(text, "Pole.step", "main", phase=Phase.EVALUATION) == ()


@pytest.mark.parametrize(
    ("via", "idioms"),
    [
        ("gymnasium/envs/classic_control/cartpole.py:170 CartPoleEnv.step", (ENVIRONMENT,)),
        ("stable_baselines3/common/vec_env/dummy_vec_env.py:60 DummyVecEnv.step_wait", (ENVIRONMENT,)),
        ("stable_baselines3/common/policies.py:640 ActorCriticPolicy.forward", (ROLLOUT,)),
        ("timm/models/vit.py:120 VisionTransformer.forward", ()),
    ],
)
def test_a_package_that_learns_by_acting_does_not_evaluate(via, idioms):
    assert of_marked("model.learn(10_000)  # here", phase=Phase.EVALUATION, via=via) == idioms


def test_a_gradient_free_call_in_a_loop_that_acts_is_a_rollout_and_elsewhere_an_evaluation():
    text = ACTING.replace("  # here", "").replace("# by act", "# here")
    assert of_marked(text, "collect", "main", phase=Phase.EVALUATION) == (ROLLOUT,)
    assert of_marked(text, "evaluate", "main", phase=Phase.EVALUATION) == ()
    assert of_marked("for x in xs:\n    y = model(x)  # here", phase=Phase.EVALUATION) == (PYTHON_LOOP,)


@pytest.mark.parametrize(
    ("function", "idioms"),
    [
        ("Coach.executeEpisode", (ROLLOUT,)),
        ("MCTS.search", ()),
        ("run_mcts", (ROLLOUT,)),
        ("self_play", (ROLLOUT,)),
        ("evaluate_episodes", ()),
        ("train_episodes", ()),
        ("rollout_error", ()),
        ("predict", ()),
    ],
)
def test_a_model_that_plays_without_gradients_makes_what_it_learns_from(function, idioms):
    text = "def f():\n    pi = predict(board)  # here\n"
    assert of_marked(text, function, "main", phase=Phase.EVALUATION) == idioms
    assert of_marked(text, "sample_episode", "main", phase=Phase.DATA_WAIT) == (), "a few-shot task"


FLAT = """
for t in range(1000):
    q = model(state)
    action = q.argmax()
    following, reward, done, info = env.step(action)
    memory.append((state, action, reward, following))
    wanted = model(nexts).max(1)
    loss = (model(states) - wanted).pow(2).mean()
    loss.backward()
    state = following
"""


@pytest.mark.parametrize(
    ("statement", "acts"),
    [("q = model(state)", True), ("action = q.argmax()", True), ("wanted = model(nexts).max(1)", False)],
)
def test_in_a_loop_that_acts_and_learns_only_what_leads_to_the_next_step_is_acting(statement, acts):
    text = FLAT.replace(statement, f"{statement}  # here")
    assert (ROLLOUT in of_marked(text, phase=Phase.EVALUATION)) is acts
