"""What a line is for where names mislead: in models, in losses, on a CPU, and among environments."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import (
    CLIP,
    EMA,
    ENVIRONMENT,
    LOG,
    METRIC,
    PYTHON_LOOP,
    ROLLOUT,
    SYNC,
)
from diagnose.source.sources import Sources

FILE = "/train.py"
PURPOSES = {LOG, CLIP, EMA, METRIC}


def of_marked(text: str, *functions: str, phase: Phase = Phase.OTHER, via: str = "", **options: bool):
    """The idioms of the line that ends in `# here`, in functions of these names, innermost first.

    Each function's line is the one with its name in it and `# by`, where there is one.
    """
    rows = text.splitlines()
    line = 1 + next(i for i, row in enumerate(rows) if row.endswith("# here"))
    stack = [(FILE, line, functions[0] if functions else "<module>")]
    for function in functions[1:]:
        called = [i for i, row in enumerate(rows) if row.endswith(f"# by {function}")]
        stack.append((FILE, 1 + called[0] if called else 1, function))
    return Idioms(Places(Sources({FILE: text}))).of(stack, via, phase, **options)


# -- models and losses


@pytest.mark.parametrize(
    ("functions", "statement"),
    [
        (("CLIP.forward", "main"), "features = self.visual(images)"),
        (("CLIP.encode_image", "CLIP.forward", "main"), "x = self.visual(images)"),
        (("ClipLoss.forward", "main"), "loss = F.cross_entropy(logits, labels)"),
        (("clip_loss", "main"), "loss = F.cross_entropy(logits, labels)"),
        (("RealNVP.log_prob", "main"), "z = self.flow(x)"),
        (("CRF.log_likelihood", "CRF.forward", "main"), "score = emissions.logsumexp(1)"),
        (("log_sum_exp", "CRF.forward", "main"), "top = scores.max(dim=1)"),
        (("LogSTFT.forward", "main"), "spectrum = torch.stft(x, 512)"),
        (("VectorQuantizerEMA.forward", "main"), "distances = torch.cdist(x, self.codes)"),
        (("ShadowNet.forward", "main"), "x = self.convolve(x)"),
        (("MetricLearner.forward", "main"), "x = self.embed(x)"),
        (("MoE.forward", "main"), "weights, experts = torch.topk(scores, 2)"),
        (("Neighbours.forward", "main"), "near = dist.topk(k)"),
        (("box_loss", "main"), "loss = 1 - generalized_box_iou(boxes, wanted).diag()"),
        (("bbox_iou", "box_loss", "main"), "inter = (right - left).clamp(0)"),
        (("bbox_iou", "ComputeLoss.__call__", "main"), "inter = (right - left).clamp(0)"),
        (("Head.forward", "main"), "out = logits.softmax(-1).log()"),
        (("Head.forward", "main"), "x = self.f1(x)"),
        (("adapt", "main"), "fast = [p - lr * g for p, g in zip(params, grads)]"),
        (("penalty", "main"), "total = sum(g.norm() ** 2 for g in grads)"),
        (("Memory.forward", "main"), "self.memory.write(key, value)"),
        (("Quantizer.forward", "main"), "self.code_ema.update(codes)"),
    ],
)
def test_what_a_model_or_a_loss_computes_is_none_of_the_loops_business(functions, statement):
    text = f"def f(self):\n    {statement}  # here\n"
    assert not PURPOSES & set(of_marked(text, *functions, phase=Phase.FORWARD))


@pytest.mark.parametrize(
    ("functions", "statement"),
    [
        (("Trainer.training_step", "main"), "accuracy = accuracy_of(out, y)"),
        (("compute_accuracy", "training_step", "main"), "_, best = out.topk(5)"),
        (("training_step", "main"), "hits = (out.argmax(1) == y).float().mean()"),
    ],
)
def test_a_metric_that_is_returned_beside_the_loss_is_one(functions, statement):
    text = f"def f(self):\n    {statement}  # here\n"
    assert METRIC in of_marked(text, *functions, phase=Phase.FORWARD)


@pytest.mark.parametrize(
    "statement", ["print(model(x))", "meter.update(model(x).item())", "accuracy = score_accuracy(model(x))"]
)
def test_the_time_of_a_model_is_not_that_of_what_its_line_does_with_the_result(statement):
    text = f"{statement}  # here"
    assert of_marked(text, phase=Phase.FORWARD, called=True) == ()
    assert of_marked(text, phase=Phase.FORWARD) != ()


@pytest.mark.parametrize(
    ("statement", "idiom"),
    [
        ("print(x.shape)", LOG),
        ("logger.debug('shape %s', x.shape)", LOG),
        ("self.log.write(text)", LOG),
        ("self.writer.add_histogram('h', x)", LOG),
    ],
)
def test_a_model_that_prints_is_said_to(statement, idiom):
    text = f"def f(self):\n    {statement}  # here\n"
    assert idiom in of_marked(text, "Net.forward", "main", phase=Phase.FORWARD)


def test_a_momentum_encoder_that_averages_in_its_forward_pass_is_an_average():
    text = """
def _momentum_update(self):
    for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
        k.data = k.data * self.m + q.data * (1 - self.m)  # here
"""
    assert of_marked(text, "MoCo._momentum_update", "MoCo.forward", phase=Phase.FORWARD) == (EMA,)


def test_a_metric_of_a_package_is_one_in_a_model_too():
    text = "def f(self):\n    self.score(out)  # here\n"
    via = "torchmetrics/metric.py:120 Metric.forward"
    assert of_marked(text, "Net.forward", phase=Phase.FORWARD, via=via) == (METRIC,)


# -- the loop, its helpers and trainers


@pytest.mark.parametrize(
    "statement",
    [
        "out = logits.log()",
        "out = logits.softmax(-1).log()",
        "out = catalogue.log()",
        "near = dist.topk(k)",
        "best, which = torch.topk(scores, 2)",
        "fast = [p - lr * g for p, g in zip(params, grads)]",
        "fast = {n: p - lr * g for (n, p), g in zip(model.named_parameters(), grads)}",
    ],
)
def test_words_in_names_are_no_purpose_in_the_loop_either(statement):
    assert not PURPOSES & set(of_marked(f"def f(x):\n    {statement}  # here\n", "main"))


@pytest.mark.parametrize(
    "function",
    [
        "log_prob",
        "Policy.log_prob",
        "log_likelihood",
        "logSumExp",
        "log_softmax",
        "clip_images",
        "ClipRunner.go",
        "MetricLearner.embed",
        "metric_loss",
        "MetricTrainer.step",
    ],
)
def test_a_function_of_the_loop_named_after_mathematics_or_a_model_has_no_purpose(function):
    assert of_marked("def f(x):\n    y = x * 2  # here\n", function, "main") == ()


PAIRS = "for a, b in zip(old.parameters(), new.parameters()):\n        "


@pytest.mark.parametrize(
    ("function", "body", "idiom"),
    [
        ("clip", "total = 0\n    for p in ps:\n        total += f(p.grad)  # here", CLIP),
        ("clip_gradients", "scale = limit / total  # here", CLIP),
        ("Trainer._clip", "for p in model.parameters():\n        p.grad.mul_(scale)  # here", CLIP),
        ("GradClipper.__call__", "scale = limit / total  # here", CLIP),
        ("log_metrics", "row = '%d' % step  # here", LOG),
        ("Logger.log", "row = '%d' % step  # here", LOG),
        ("MetricLogger.update", "self.total += value  # here", METRIC),
        ("Trainer.report", "print(row)  # here", LOG),
        ("update_ema", "decay = min(d, (1 + n) / (10 + n))  # here", EMA),
        ("ModelEMA.update", "own = model.state_dict()\n    d = self.d(n)  # here", EMA),
        ("Trainer._average", PAIRS + "a.lerp_(b, w)  # here", EMA),
        ("Trainer._after", "self.model_ema.update(self.model)  # here", EMA),
        ("soft_update", PAIRS + "a.data.copy_(tau * b + keep * a)  # here", EMA),
        ("Trainer._score", "hits = (out.argmax(1) == labels).float().mean()  # here", METRIC),
        ("compute_accuracy", "_, best = out.topk(5)  # here", METRIC),
        ("Trainer._score", "hits = accuracy(out, labels)  # here", METRIC),
        ("Trainer._get_seg_metrics", "share = inter / union  # here", METRIC),
        ("AccuracyLogger.log", "self.seen[y] += found == y  # here", METRIC),
        ("AccuracyLogger.log", "row = found  # here\n    print(row)", LOG),
        ("AccuracyLogger.log", "row = found  # here\n    show(row)\n\ndef show(row):\n    print(row)", LOG),
        ("Net.log_accuracy", "hits = found == y  # here\n    self.log('hits', hits)", LOG),
        ("MessageLogger.__call__", "row = '%d' % step  # here", LOG),
    ],
)
def test_helpers_and_trainers_that_log_clip_average_or_score_are_told(function, body, idiom):
    for phase in (Phase.OTHER, Phase.OPTIMIZER):
        assert idiom in of_marked(f"def f(step):\n    {body}\n", function, "main", phase=phase)


@pytest.mark.parametrize(
    ("function", "body"),
    [
        (
            "grad_clip",
            "for net in nets:\n        torch.nn.utils.clip_grad_norm_(net.parameters(), 1)  # here",
        ),
        ("clip_grads", "limit = 3  # here\n    clip_grad_norm_(ps, limit)"),
        ("log_metrics", "raise ValueError(row)  # here"),
        ("score_accuracy", "raise ValueError(row)  # here"),
    ],
)
def test_what_torch_clips_at_once_and_what_fails_has_no_purpose(function, body):
    assert not PURPOSES & set(of_marked(f"def f(nets):\n    {body}\n", function, "main"))


@pytest.mark.parametrize(
    "statement",
    ["average.mul_(beta).add_(p.grad.clip_(-1, 1))", "scale = exp_avg_sq.sqrt().add_(group['eps'])"],
)
def test_an_optimizer_of_the_scripts_own_neither_clips_nor_averages(statement):
    loops = "for group in self.param_groups:\n        for p in group['params']:\n            "
    text = f"def step(self):\n    {loops}{statement}  # here\n"
    found = of_marked(text, "Lion.step", "main", phase=Phase.OPTIMIZER)
    assert not {CLIP, EMA} & set(found)
    assert {CLIP, EMA} & set(of_marked(text, "f", "main"))


def test_a_batch_function_is_not_named_by_what_it_computes():
    text = "def f(x):\n    y = x * 2  # here\n"
    assert of_marked(text, "log_mels", "main", phase=Phase.DATA_WAIT) == ()


# -- reading values


@pytest.mark.parametrize(
    ("statement", "on_a_cpu"),
    [
        ("running += loss.item()", (SYNC,)),
        ("losses.append(float(loss))", (SYNC,)),
        ("values = out.detach().cpu().numpy()", (SYNC,)),
        ("assert torch.isfinite(loss).all()", (SYNC,)),
        ("book.update(weigh(loss.item()))", ()),
        ("packed = pack_padded_sequence(x, lengths.cpu())", ()),
        ("indices = linear_sum_assignment(costs.cpu())", ()),
        ("rows = [render(row.tolist()) for row in out]", (PYTHON_LOOP,)),
        ("for p in ps:\n    if not torch.isfinite(p.grad).all():", (PYTHON_LOOP,)),
        ("for p in ps:\n    assert not torch.isnan(p).any(), p", (PYTHON_LOOP,)),
        ("for p in ps:\n    losses.append(p.item())", (SYNC,)),
        ("for x in xs:\n    loss.backward()\n    if torch.isnan(loss):", (SYNC,)),
    ],
)
def test_on_a_cpu_reading_a_value_is_blamed_only_for_a_statement_that_does_nothing_else(
    statement, on_a_cpu
):
    text = f"{statement}  # here" + ("\n        pass" if statement.endswith(":") else "")
    assert SYNC in of_marked(text)
    assert of_marked(text, waits=False) == on_a_cpu


@pytest.mark.parametrize(
    "statement",
    ["pbar.set_postfix(loss=loss.item())", "bar.set_description(f'{loss:.3f}')"],
)
def test_a_progress_bar_is_logging(statement):
    assert of_marked(f"{statement}  # here", waits=False) == (LOG,)


def test_a_line_whose_time_is_a_progress_bars_is_logging_but_the_loop_over_it_is_not():
    assert of_marked("bar.update(1)  # here", via="tqdm/std.py:1325 tqdm.refresh") == (LOG,)
    text = "for x in tqdm(rows):  # here\n    loss.backward()\n"
    assert of_marked(text, via="tqdm/std.py:1181 tqdm.__iter__") == ()


# -- environments

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
