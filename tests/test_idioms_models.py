"""What a line is for where names mislead: in models, in losses, and on a CPU."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.purposes import CLIP, EMA, LOG, METRIC, PYTHON_LOOP, SYNC
from tests.marked import of_marked

PURPOSES = {LOG, CLIP, EMA, METRIC}

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
