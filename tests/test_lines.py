"""What the lines of a helper are for, that the loop calls between its steps."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.lines import source_lines
from diagnose.analysis.long_steps import LongSteps
from diagnose.analysis.series import find_spikes
from diagnose.core.ledger import COUNTS, SLOT_OF
from diagnose.core.phases import Phase
from diagnose.core.places import begins_ns, coded, place_of
from diagnose.core.profile import SourceLine
from diagnose.source.places import Places
from diagnose.source.purposes import LOG, METRIC, PYTHON_LOOP, SAVE, SCHEDULE, SYNC
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from tests.rank_logs import MS, NOBODY, log_of, steps_of

SCRIPT = """\
    import json

    def record(step, losses):
        rows = [f"{loss:.3f}" for loss in losses]
        with open("book", "w") as book:
            json.dump({"step": step, "rows": rows}, book)
        return losses[-1].item()

    def judge(scores):
        right = 0
        for score in scores.tolist():
            right += sorted([score, 0.5]).index(score)
        return right

    def keep(state, digest):
        held = pickle.dumps(state)
        with open("state", "wb") as out:
            out.write(held)
        digest.update(held)
        log.info("kept %d bytes", len(held))

    for step, x in enumerate(data):
        loss = model(x)
        loss.backward()
        record(step, losses)
        judge(loss)
        keep(model, digest)
"""


@pytest.fixture
def idioms(tmp_path: Path) -> Any:
    """Returns the idioms of each line, after samples of the time behind a step: line, function, weight."""
    path = tmp_path / "train.py"
    path.write_text(dedent(SCRIPT), encoding="utf-8")
    file = str(path)

    def found(*sampled: tuple[int, str, int], device: str = "cpu") -> dict[int, tuple[str, ...]]:
        slot = SLOT_OF["gap_after_backward"]
        nobody = ("", 0, "")
        callers = {name: (file, 25 + at, "<module>") for at, name in enumerate(("record", "judge", "keep"))}
        samples = [
            (1, slot, (nobody, (file, line, function), callers[function]), weight)
            for line, function, weight in sampled
        ]
        steps = steps_of(60, backward=50, gap_after_backward=50)
        log = log_of(
            steps,
            samples=samples,
            sites=[("forward", file, 23, "<module>", 9), ("backward", file, 24, "<module>", 9)],
            meta={"samples": sum(weight for *_, weight in sampled), "device": device},
        )
        lines = source_lines(log, log.steps[1:], 1, Roles(log.sites, Sources()), Places(Sources()))
        return {line.line: line.idiom for line in lines}

    return found


def test_what_a_helper_does_besides_serves_what_it_mostly_does(idioms):
    assert idioms((6, "record", 60), (4, "record", 30), (7, "record", 10)) == {
        6: (LOG,),
        4: (LOG,),
        7: (LOG, SYNC),
    }


def test_a_helper_that_mostly_computes_is_not_there_for_the_file_it_writes(idioms):
    assert idioms((6, "record", 30), (4, "record", 60), (7, "record", 10))[4] == (PYTHON_LOOP,)
    assert idioms((6, "record", 30), (4, "record", 60), (7, "record", 10))[6] == (LOG,)


def test_what_a_function_writes_that_saves_the_state_is_the_state(idioms):
    found = idioms((16, "keep", 10), (18, "keep", 60), (19, "keep", 20), (20, "keep", 10))
    assert found == {16: (SAVE,), 18: (SAVE,), 19: (SAVE,), 20: (LOG,)}
    assert idioms((18, "keep", 60), (20, "keep", 10))[18] == (SAVE,), "it was pickled"


KEEPS = """\
def keep_hard(windows, losses, step):
    ranked = [windows[i] for i in losses]
    if step % 50:
        return
    text = encoded(ranked)
    torch.save(text, "hard.pt")

for step, x in enumerate(data):
    loss = model(x)
    loss.backward()
    keep_hard(x, loss, step)
"""
IN_A_BRANCH = KEEPS.replace("if step % 50:\n        return\n", "if step % 50 == 0:\n")
IN_A_BRANCH = IN_A_BRANCH.replace("    text =", "        text =").replace("    torch.", "        torch.")


@pytest.mark.parametrize("text", [KEEPS, IN_A_BRANCH])
def test_what_a_function_does_in_each_call_does_not_serve_a_save_now_and_then(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    file = str(path)
    last = len(text.splitlines())
    save = next(number for number, line in enumerate(text.splitlines(), 1) if "torch.save" in line)
    slot = SLOT_OF["gap_after_backward"]
    samples = [
        (1, slot, (NOBODY, (file, line, "keep_hard"), (file, last, "<module>")), weight)
        for line, weight in ((2, 60), (save - 1, 20), (save, 20))
    ]
    log = log_of(
        steps_of(60, backward=50, gap_after_backward=50),
        samples=samples,
        sites=[("forward", file, last - 2, "<module>", 9), ("backward", file, last - 1, "<module>", 9)],
        meta={"samples": 100},
    )
    lines = source_lines(log, log.steps[1:], 1, Roles(log.sites, Sources()), Places(Sources()))
    assert {line.line for line in lines if SAVE in line.idiom} == {save - 1, save}


def test_a_callback_that_saves_now_and_then_is_not_there_to_save(idioms):
    assert idioms((12, "judge", 60), (16, "judge", 5))[12] == (PYTHON_LOOP,)


def test_another_function_keeps_its_own_purpose(idioms):
    assert idioms((6, "record", 90), (12, "judge", 10))[12] == (PYTHON_LOOP,)


def test_on_a_cpu_reading_a_tensor_is_a_way_to_loop_over_it(idioms):
    sampled = (12, "judge", 60), (11, "judge", 40)
    assert idioms(*sampled)[11] == (PYTHON_LOOP,)
    assert idioms(*sampled, device="cuda")[11] == (SYNC,)
    assert METRIC not in idioms(*sampled)[12]


def test_a_line_that_leaves_training_to_a_package_is_there_for_nothing_else(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "print(trainer.train())\nloss.backward(); optimizer.step(); print(loss)\n", encoding="utf-8"
    )
    package = ("/v/lib/python3.11/site-packages/trainers/loop.py", 7, "Loop._do")

    def of_line(line: int, library: tuple[str, int, str]) -> SourceLine:
        stack = (library, (str(path), line, "<module>"))
        slots = [SLOT_OF[name] for name in ("backward", "optimizer", "gap_after_backward")]
        log = log_of(
            steps_of(60, backward=50, optimizer=20, gap_after_backward=50),
            samples=[(1, slot, stack, 30) for slot in slots],
            meta={"samples": 90},
        )
        lines = source_lines(log, log.steps[1:], 1, Roles(log.sites, Sources()), Places(Sources()))
        return next(line for line in lines if line.phase is Phase.OTHER)

    assert (of_line(1, package).trains, of_line(1, package).idiom) == (True, ())
    assert (of_line(2, NOBODY).trains, of_line(2, NOBODY).idiom) == (False, (LOG,))


@pytest.mark.parametrize(("slot", "idiom"), [("forward", ()), ("gap_after_forward", (LOG,))])
def test_the_time_of_a_model_is_not_that_of_printing_what_it_returns(tmp_path, slot, idiom):
    path = tmp_path / "train.py"
    path.write_text("print(model(x))\nloss.backward()\n", encoding="utf-8")
    file = str(path)
    log = log_of(
        steps_of(60, **{slot: 50}),
        samples=[(1, SLOT_OF[slot], (NOBODY, (file, 1, "<module>")), 30)],
        sites=[("forward", file, 1, "<module>", 9), ("backward", file, 2, "<module>", 9)],
        meta={"samples": 30},
    )
    (line,) = source_lines(log, log.steps[1:], 1, Roles(log.sites, Sources()), Places(Sources()))
    assert line.idiom == idiom


def test_a_line_tells_what_passed_between_calls_and_what_in_a_model_below_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("for x in loader:\n    y = ensemble(dust(x))\n    y.backward()\n", encoding="utf-8")
    file = str(path)
    outer, inner = (file, 2, "<module>"), (file, 9, "likelihood")
    log = log_of(
        steps_of(60, data_wait=20, gap_after_data_wait=30, forward=50),
        samples=[
            (1, SLOT_OF["data_wait"], (NOBODY, outer), 20),
            (1, SLOT_OF["gap_after_data_wait"], (NOBODY, outer), 30),
            (1, SLOT_OF["forward"], (NOBODY, inner, outer), 50),
        ],
        sites=[("forward", file, 2, "<module>", 9), ("backward", file, 3, "<module>", 9)],
        meta={"samples": 100},
    )
    lines = source_lines(log, log.steps[1:], 1, Roles(log.sites, Sources()), Places(Sources()))
    outside = [line for line in lines if line.line == 2]
    assert sum(line.share for line in outside) == pytest.approx(0.5)
    assert sum(line.between for line in outside) == pytest.approx(0.3)
    assert [line.model_share for line in lines] == pytest.approx([0.5] * len(lines))


NAMED_AROUND = """\
    class Runner:
        def compute_metrics(self, x, y):
            out = self.net(x)
            return {"loss": crit(out, y), "hits": out.argmax(1)}

        def perceptual_metrics(self, out, y):
            near = self.judge(out, y)
            return near.mean()

        def step_and_log(self, found):
            found["loss"].backward()
            self.optimizer.step()

        def go(self):
            for x, y in self.loader:
                found = self.compute_metrics(x, y)
                near = self.perceptual_metrics(x, y)
                self.step_and_log(found)
"""


@pytest.mark.parametrize(
    ("slot", "parts", "idiom"),
    [
        ("forward", ("out = self.net", "= self.compute_metrics"), ()),
        ("optimizer", ("optimizer.step", "self.step_and_log(found)"), ()),
        ("forward", ("near = self.judge", "= self.perceptual_metrics"), (METRIC,)),
    ],
)
def test_the_time_of_a_model_or_an_optimizer_is_not_that_of_what_their_caller_is_called(
    tmp_path, slot, parts, idiom
):
    path = tmp_path / "train.py"
    path.write_text(dedent(NAMED_AROUND), encoding="utf-8")
    file, rows = str(path), dedent(NAMED_AROUND).splitlines()

    def frame(part: str) -> tuple[str, int, str]:
        line = 1 + next(at for at, row in enumerate(rows) if part in row)
        within = [row.split("def ")[1].split("(")[0] for row in rows[: line - 1] if "def " in row]
        return file, line, f"Runner.{within[-1]}"

    around = {
        "forward": ("out = self.net", "= self.compute_metrics"),
        "backward": ('found["loss"].back', "self.step_and_log(found)"),
        slot: parts,
    }
    sites = [("out = self.net", "forward"), ("near = self.judge", "further"), ('["loss"].back', "backward")]
    log = log_of(
        steps_of(60, **dict.fromkeys(around, 20)),
        samples=[(1, SLOT_OF[name], (NOBODY, *map(frame, at)), 30) for name, at in around.items()],
        sites=[(kind, *frame(part), 9) for part, kind in [*sites, ("optimizer.step", "optimizer")]],
        meta={"samples": 30 * len(around)},
    )
    lines = source_lines(log, log.steps[1:], 1, Roles(log.sites, Sources(), log.samples), Places(Sources()))
    assert [line.idiom for line in lines if line.line == frame(parts[0])[1]] == [idiom]


def test_where_a_schedule_was_stepped_its_time_is_that_whatever_it_is_called(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("loss.backward()\noptimizer.step()\nwarmup.step()\n", encoding="utf-8")
    file = str(path)
    log = log_of(
        steps_of(60, optimizer=50),
        samples=[(1, SLOT_OF["optimizer"], (NOBODY, (file, line, "<module>")), 30) for line in (2, 3)],
        sites=[
            ("backward", file, 1, "<module>", 9),
            ("optimizer", file, 2, "<module>", 9),
            ("schedule", file, 2, "<module>", 9),
            ("schedule", file, 3, "<module>", 9),
        ],
        meta={"samples": 60},
    )
    lines = source_lines(log, log.steps[1:], 1, Roles(log.sites, Sources()), Places(Sources()))
    assert {line.line: line.idiom for line in lines} == {2: (), 3: (SCHEDULE,)}


AT_RANDOM = np.random.default_rng(3).choice(200, 20, replace=False)


@pytest.mark.parametrize(
    ("long", "slot", "part"),
    [
        (AT_RANDOM, "gap_after_optimizer", 0.64),
        (AT_RANDOM, "data_wait", 0.0),  # which a loader waited for
        (np.arange(9, 200, 10), "gap_after_optimizer", 0.0),
        (np.r_[40:50, 130:140], "gap_after_optimizer", 0.0),  # two events, such as the ends of two epochs
    ],
    ids=["at random", "in a hooked call", "regularly", "in two runs"],
)
def test_a_line_tells_what_it_takes_in_few_long_steps_that_come_at_no_regular_interval(
    tmp_path, long, slot, part
):
    file = tmp_path / "train.py"
    file.write_text("settle()\nbook()\nobs, reward, done, info = env.step(act)\n", encoding="utf-8")
    steps = steps_of(200, forward=20, **{slot: 5})
    steps[long, len(COUNTS) + SLOT_OF[slot]] += 40 * MS
    late = [*np.arange(3, 5, 0.1), *np.arange(6, 44, 0.5)]
    samples = [
        (5, coded(SLOT_OF[slot], place_of(int(ms * MS))), (NOBODY, (str(file), line, "<module>")), MS)
        for line, moments in ((1, late), (2, np.arange(0.5, 3, 0.1)), (3, late))
        for ms in moments
    ]
    log = log_of(steps, samples=samples, meta={"samples": len(samples)})
    lines = source_lines(log, log.steps[1:], 1, Roles([], Sources()), Places(Sources()))
    settle, book, act = sorted(lines, key=lambda line: line.line)
    assert (book.irregular, act.irregular) == (0, 0)
    assert act.acting == pytest.approx(act.share)
    assert settle.irregular / settle.share == pytest.approx(part, abs=0.08)


def test_the_part_of_long_steps_at_a_moment_is_theirs_among_all_that_last_longer():
    draw = np.random.default_rng(5)
    steps = steps_of(300, forward=20, gap_after_optimizer=draw.exponential(3, 300))
    slot = SLOT_OF["gap_after_optimizer"]
    steps[draw.choice(300, 15, replace=False), len(COUNTS) + slot] += 60 * MS
    slots_ns = steps[:, len(COUNTS) :].astype(float)
    times = slots_ns[:, slot]
    usual_ns, spikes = find_spikes(times, float(np.median(slots_ns.sum(axis=1))))
    long_steps = LongSteps(steps, by_device=False)
    last = place_of(int(times.max()))
    places = [place for place in range(1, last) if begins_ns(place) >= usual_ns]
    expected = [spikes[times > begins_ns(place)].mean() for place in places]
    assert [long_steps.part(slot, place) for place in places] == pytest.approx(expected)
    assert 0 < min(expected) < max(expected) == 1
    assert long_steps.part(slot, place_of(int(usual_ns)) - 1) == 0
    assert long_steps.part(slot, last + 1) == 0
    assert LongSteps(steps, by_device=True).part(slot, last) == 0
