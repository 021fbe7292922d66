"""What statements of real training loops serve, one shape of loop after the other."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from tests.sampled_script import AFTER_BACKWARD, AFTER_FORWARD, AFTER_OPTIMIZER, PASSES, Script

FORWARD, DATA, OTHER = Phase.FORWARD, Phase.DATA_WAIT, Phase.OTHER

AFTERWARDS = Script(
    """
    for batch in loader:
        x = batch["image"]
        x = augment(x)
        x = model(x)
        scores = sigmoid(x)
        loss = criterion(x, batch["label"])
        loss.backward()
        optimizer.step()
        notes = describe(model)
        batch["note"] = notes
        scores = curve(scores)
    """,
    [("for batch in", "next"), ("= model(x)", "forward"), *PASSES],
)


def test_what_is_made_after_the_last_use_of_a_name_serves_nothing():
    assert AFTERWARDS.phase("x = augment", slot=AFTER_OPTIMIZER) is DATA
    for line in ("notes = describe", 'batch["note"]', "scores = curve"):
        assert AFTERWARDS.phase(line, slot=AFTER_OPTIMIZER) is OTHER


TWO_MODELS = Script(
    """
    for rays in loader:
        near = sample(rays)
        coarse = coarse_net(near)
        weights = render(coarse)
        scale = pick(rays)
        fine_at = resample(weights, scale)
        fine = fine_net(fine_at)
        fine *= mask
        loss = mse(fine, rays)
        loss /= 4
        loss.backward()
        optimizer.step()
    """,
    [("for rays", "next"), ("= coarse_net", "forward"), ("= fine_net", "forward"), *PASSES],
)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("near = sample", DATA),
        ("weights = render", FORWARD),
        ("fine_at = resample", FORWARD),
        ("scale = pick", DATA),
        ("fine *= mask", FORWARD),
        ("loss /= 4", FORWARD),
    ],
)
def test_what_lies_between_two_models_is_a_part_of_the_pass(line, phase):
    assert TWO_MODELS.phase(line, slot=AFTER_FORWARD) is phase


TRAINER = Script(
    """
    class Trainer:
        def train_iter(self):
            inputs, targets = self.prefetcher.next()
            inputs = resize(inputs, self.input_size)
            outputs = self.model(inputs, targets)
            loss = outputs["total_loss"]
            loss.backward()
            self.optimizer.step()

        def after_iter(self):
            if self.iter % 10 == 0:
                text = describe(self.meter)
                log_to(text)
            self.input_size = random_resize(self.size_seed)

        def train(self):
            for self.iter in range(self.max_iter):
                self.train_iter()
                self.after_iter()
    """,
    [("= self.model(", "forward"), ("loss.backward", "backward"), ("self.optimizer.step", "optimizer")],
    inside=[
        ("forward", "= self.model(", "self.train_iter()"),
        ("backward", "loss.backward", "self.train_iter()"),
    ],
)


@pytest.mark.parametrize(
    ("line", "phase"), [("log_to(text)", OTHER), ("text = describe", OTHER), ("self.input_size = ", DATA)]
)
def test_of_a_method_that_the_next_batch_needs_only_what_makes_that_is_data(line, phase):
    assert TRAINER.phase(line, "self.after_iter()", slot=AFTER_OPTIMIZER) is phase


THROUGH = Script(
    """
    def accumulate(batches, report):
        for batch in batches:
            out = model(batch.src)
            loss = crit(out, batch.tgt)
            loss.backward()
            report.update(out)

    for batches in grouped:
        batches = sort(batches)
        accumulate(batches, report)
        report = maybe_report(report)
    """,
    [("= model(", "forward"), ("loss.backward", "backward")],
    inside=[("forward", "= model(", "    accumulate(batches, report)")],
)


def test_of_what_a_function_is_given_only_that_is_data_of_which_it_makes_the_batch():
    assert THROUGH.phase("batches = sort", slot=AFTER_OPTIMIZER) is DATA
    assert THROUGH.phase("report = maybe_report", slot=AFTER_OPTIMIZER) is OTHER


GENERATOR = Script(
    """
    def log_every(loader, meter):
        for rows in loader:
            rows = pack(rows)
            yield rows
            meter.update(time())
            print(meter)

    for rows in log_every(loader, meter):
        loss = model(rows)
        loss.backward()
        optimizer.step()
    """,
    [("in loader", "next"), ("= model(", "forward"), *PASSES],
)


@pytest.mark.parametrize(
    ("line", "phase"), [("rows = pack", DATA), ("meter.update", OTHER), ("print(meter)", OTHER)]
)
def test_of_a_generator_around_the_loader_only_what_it_yields_is_data(line, phase):
    assert GENERATOR.phase(line, "for rows in log_every", slot=AFTER_OPTIMIZER) is phase


OWN_GRAPH = Script(
    """
    class Net(nn.Module):
        def __init__(self):
            self.embedding = nn.Embedding(10, 4)
            self.factor = 2

        def computer(self):
            return propagate(self.embedding.weight)

        def scaled(self, labels):
            return labels * self.factor

        def bpr(self, users):
            table = self.computer()
            labels = self.scaled(users)
            labels = labels.to(self.device)
            return dot(self.proj(table), labels)

    for users in batches:
        loss = net.bpr(users)
        loss.backward()
        optimizer.step()
    """,
    [("self.proj(table)", "forward"), *PASSES],
    inside=[("forward", "self.proj(table)", "loss = net.bpr")],
)


@pytest.mark.parametrize(("line", "phase"), [("labels = self.scaled", DATA), ("labels = labels.to", DATA)])
def test_what_a_loss_gets_of_settings_is_data(line, phase):
    assert OWN_GRAPH.phase(line, "loss = net.bpr", slot=AFTER_OPTIMIZER) is phase


NO_MODULE_IS_ITS_ARGUMENT = Script(
    """
    class Net(nn.Module):
        def __init__(self):
            self.embedding = nn.Embedding(10, 4)

        def computer(self):
            return propagate(self.embedding.weight)

    for users in batches:
        rows = pick(users)
        out = head(rows)
        table = net.computer()
        loss = dot(out, table)
        loss.backward()
        optimizer.step()
    """,
    [("= head(rows)", "forward"), *PASSES],
)


def test_a_method_that_uses_weights_computes():
    assert NO_MODULE_IS_ITS_ARGUMENT.phase("table = net.computer", slot=AFTER_FORWARD) is FORWARD
    assert NO_MODULE_IS_ITS_ARGUMENT.phase("rows = pick", slot=AFTER_FORWARD) is DATA


ON_POLICY = Script(
    """
    while True:
        values, rewards = [], []
        for _ in range(steps):
            logits, value = net(states)
            action = choose(logits)
            states, reward = play(action)
            values.append(value)
        returns = []
        for value, reward in zip(values, rewards):
            returns.append(discount(value, reward))
        advantages = stack(returns)
        for epoch in range(4):
            for rows in permute(advantages):
                out = net(states[rows])
                ratio = compare(out, rows)
                loss = (ratio * advantages[rows]).mean()
                loss.backward()
                optimizer.step()
    """,
    [("= net(states)", "forward"), ("= net(states[rows])", "forward"), *PASSES],
)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("returns.append", DATA),
        ("advantages = stack", DATA),
        ("action = choose", DATA),
        ("ratio = compare", FORWARD),
    ],
)
def test_what_is_made_before_the_loop_that_learns_is_its_data(line, phase):
    assert ON_POLICY.phase(line, slot=AFTER_FORWARD) is phase


IN_PLACE = Script(
    """
    def fill(rows, into):
        into.data.resize_(len(rows)).copy_(rows)

    for rows in batches:
        fill(rows, pixels)
        out = net(pixels)
        target = zeros(3)
        target.view(-1).index_add_(0, rows, out.detach())
        loss = crit(out, target)
        loss.backward()
        optimizer.step()
    """,
    [("= net(", "forward"), *PASSES],
)


def test_what_is_changed_in_place_is_written():
    assert IN_PLACE.phase("into.data.resize_", "    fill(rows, pixels)", slot=AFTER_OPTIMIZER) is DATA
    assert IN_PLACE.phase("target.view", slot=AFTER_FORWARD) is FORWARD


FUNCTIONAL = Script(
    """
    for data in loader:
        pixels = data["image"].to(device) / 255
        picture = rasterize(splats, data["camera"])
        loss = distance(picture, pixels)
        loss.backward()
        optimizer.step()
        data = {"step": step, "splats": splats}
        save(data)
    """,
    [("for data", "next"), *PASSES],
)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("pixels = data", DATA),
        ("picture = rasterize", FORWARD),
        ("loss = distance", FORWARD),
        ('data = {"step"', OTHER),
    ],
)
def test_without_a_module_the_batch_is_what_is_made_of_it_alone(line, phase):
    assert FUNCTIONAL.phase(line, slot=AFTER_BACKWARD) is phase


ACTING = Script(
    """
    for step in range(9):
        action = actor(state)
        chosen = action.detach().numpy()
        state, reward, done = envs.step(chosen)
        value = critic(state)
        loss = mse(value, reward)
        loss.backward()
        optimizer.step()
    """,
    [("= actor(", "forward"), ("= critic(", "forward"), *PASSES],
)


@pytest.mark.parametrize("line", ["chosen = action", "envs.step(chosen)"])
def test_acting_between_two_models_makes_data(line):
    assert ACTING.phase(line, slot=AFTER_FORWARD) is DATA


CONDITION = Script(
    """
    class Feed:
        def set_input(self, data):
            if queue_is_ready(data):
                self.real = crop(data)
            print(data)

        def optimize(self):
            self.loss = self.net(self.real)
            self.loss.backward()

    for data in loader:
        feed.set_input(data)
        feed.optimize()
        net.set_neighbors(data)
    """,
    [("self.net(self.real)", "forward"), ("self.loss.backward", "backward"), ("for data", "next")],
    inside=[
        ("forward", "self.net(self.real)", "feed.optimize"),
        ("backward", "self.loss.backward", "feed.optimize"),
    ],
)


@pytest.mark.parametrize(
    ("line", "phase"), [("if queue_is_ready", DATA), ("self.real = crop", DATA), ("print(data)", OTHER)]
)
def test_the_condition_of_what_makes_the_batch_is_a_part_of_it(line, phase):
    assert CONDITION.phase(line, "feed.set_input(data)", slot=AFTER_OPTIMIZER) is phase


def test_what_is_done_to_the_model_makes_no_batch():
    script = Script(
        """
        for x in loader:
            model.set_finder(x)
            model = model.train()
            loss = model(x)
            loss.backward()
        """,
        [("for x", "next"), ("= model(x)", "forward"), ("loss.backward", "backward")],
    )
    for line in ("model.set_finder", "model = model.train"):
        assert script.phase(line, slot=AFTER_OPTIMIZER) is OTHER


@pytest.mark.parametrize(
    ("rows", "given", "phase"),
    [
        ("x.tolist()", "x", OTHER),
        ("x.tolist()", "out", FORWARD),
        ("x.unbind()", "x", FORWARD),
        ("[item for item in x.unbind()]", "x", FORWARD),
    ],
)
def test_what_weighs_a_loss_by_the_batch_in_python_is_the_loops_own_code(rows, given, phase):
    script = Script(
        f"""
        def weights_of(x):
            rows = {rows}
            return tensor([sum(row) for row in rows])

        for x, y in loader:
            out = model(x)
            losses = crit(out, y)
            losses = losses * weights_of({given})
            losses.mean().backward()
            optimizer.step()
        """,
        [("for x, y", "next"), ("= model(", "forward"), ("backward", "backward"), PASSES[1]],
    )
    assert script.phase("return tensor", "losses = losses *", slot=AFTER_FORWARD) is phase
    assert script.phase("losses = losses *", slot=AFTER_FORWARD) is FORWARD
