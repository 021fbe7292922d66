"""Commands to a running job: handed over as files, obeyed between trials, never more than compared."""

from __future__ import annotations

import json
import math
import os
import timeit
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.tuning import tuning_of
from diagnose.core.command import COMMANDS, Command
from diagnose.core.ledger import COLUMNS
from diagnose.core.trial import Safety, Tuning
from diagnose.launch.control import FOLDER, Inbox, send
from diagnose.report._tuning_words import verdict
from diagnose.store.reader import RankLog, read_rank
from diagnose.tuner.controller import Controller
from diagnose.tuner.kept import Kept
from diagnose.tuner.policy import Policy
from tests.running import DIAGNOSE, run, write
from tests.simulated_job import Change, Machine, controller, lead, train
from tests.test_tuner_loss import Training, tuned

# -- what a command is


@pytest.mark.parametrize(
    "command, argument",
    [
        ("pause-tuning", ""),
        ("resume-tuning", ""),
        ("allow", "precision"),
        ("forbid", "exact"),
        ("undo", "tf32-matmul"),
        ("deep-window", ""),
    ],
)
def test_the_commands_there_are(command: str, argument: str) -> None:
    assert Command(command=command, argument=argument).command in COMMANDS


@pytest.mark.parametrize(
    "command, argument",
    [
        ("__import__('os').system('true')", ""),
        ("", ""),
        ("allow", ""),
        ("allow", "everything"),
        ("undo", ""),
        ("undo", "../../etc"),
        ("undo", "a; rm -rf /"),
        ("undo", "x" * 100),
        ("pause-tuning", "now"),
        ("undo", 7),
        (["allow"], "exact"),
    ],
)
def test_what_is_no_command_is_refused(command: Any, argument: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Command(command=command, argument=argument)


# -- handing over


class Job:
    """The job's side, with what it wrote down and what reached the tuner."""

    def __init__(self, folder: Path, refusal: str = "") -> None:
        self.events: list[dict[str, Any]] = []
        self.commands: list[Command] = []
        self.refusal = refusal
        self.inbox = Inbox(folder, self._event, self._take)

    def _event(self, kind: str, **detail: Any) -> None:
        assert kind == "command"
        self.events.append(detail)

    def _take(self, command: Command) -> str:
        self.commands.append(command)
        return self.refusal


def test_commands_arrive_in_order_once_and_leave_no_file(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.inbox.look()
    wanted = [Command(command="pause-tuning"), Command(command="allow", argument="precision")]
    for command in wanted:
        send(tmp_path, command)
    job.inbox.look()
    job.inbox.look()
    assert job.commands == wanted
    assert [event["state"] for event in job.events] == ["received", "received"]
    assert list((tmp_path / FOLDER).iterdir()) == []
    send(tmp_path, Command(command="resume-tuning"))
    job.inbox.look()
    assert job.commands[2:] == [Command(command="resume-tuning")]


def test_a_refusal_is_written_down_with_its_reason(tmp_path: Path) -> None:
    job = Job(tmp_path, refusal="tuning has ended")
    send(tmp_path, Command(command="undo", argument="tf32-matmul"))
    job.inbox.look()
    assert job.events == [
        {"command": "undo", "argument": "tf32-matmul", "state": "received", "reason": ""},
        {"command": "undo", "argument": "tf32-matmul", "state": "refused", "reason": "tuning has ended"},
    ]


NAME = "00000000000000000001-0123abcd.json"


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "Expecting value"),
        (b"[]", "it is no command"),
        (b'{"command": "allow"}', "it is no command"),
        (b'{"command": "allow", "argument": "exact", "more": 1}', "it is no command"),
        (b'{"command": "exec", "argument": "print(1)"}', "there is no command 'exec'"),
        (b'{"command": {"a": 1}, "argument": ""}', "there is no command"),
        (b'{"command": "undo", "argument": ' + b'"' + b"x" * 5000 + b'"}', "too long for a command"),
        (b"[" * 900, "Expecting value"),
    ],
)
def test_a_file_that_is_no_command_is_refused_taken_away_and_harmless(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    job = Job(tmp_path)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / NAME).write_bytes(content)
    job.inbox.look()
    assert job.commands == []
    (event,) = job.events
    assert event["state"] == "refused" and reason in event["reason"]
    assert not (tmp_path / FOLDER / NAME).exists()
    assert json.dumps(event), "it can be written down"


def test_links_and_pipes_are_not_followed_and_other_files_are_left_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"command": "pause-tuning", "argument": ""}')
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / NAME).symlink_to(secret)
    os.mkfifo(folder / NAME.replace("1-", "2-"))
    (folder / "notes.txt").write_text("mine")
    job = Job(tmp_path)
    job.inbox.look()
    assert job.commands == []
    assert [event["state"] for event in job.events] == ["refused", "refused"]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert secret.exists()


def test_a_forked_child_takes_no_commands(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.inbox._pid = os.getppid()
    send(tmp_path, Command(command="pause-tuning"))
    job.inbox.look()
    assert job.events == []


def test_of_two_processes_one_takes_a_command(tmp_path: Path) -> None:
    one, other = Job(tmp_path), Job(tmp_path)
    send(tmp_path, Command(command="pause-tuning"))
    one.inbox.look()
    other.inbox.look()
    assert (len(one.commands), len(other.events)) == (1, 0)


def test_looking_for_commands_at_the_end_of_a_step_takes_less_than_a_microsecond(tmp_path: Path) -> None:
    control = controller(Machine(), [])
    orders = control._orders
    best_s = min(timeit.repeat(orders.wait, number=10_000, repeat=20)) / 10_000
    assert best_s < 1e-6, f"{best_s * 1e9:.0f} ns"


# -- obeying


def ask(control: Controller, command: str, argument: str = "") -> None:
    control._world.commands.append(Command(command=command, argument=argument))


def answers(machine: Machine) -> list[tuple[str, str, str]]:
    told = [detail for kind, detail in machine.told if kind == "command"]
    return [(each["command"], each["state"], each["reason"]) for each in told]


def states(machine: Machine) -> list[str]:
    return [detail["state"] for kind, detail in machine.told if kind == "tuning"]


def test_a_pause_begins_no_trial_and_resuming_does() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)])
    ask(control, "pause-tuning")
    train(machine, control, 500)
    assert (control.state, machine.trials()) == ("paused", [])
    assert answers(machine) == [("pause-tuning", "done", "")]
    ask(control, "resume-tuning")
    train(machine, control, 800)
    assert machine.factors == {"good": 0.5}
    assert states(machine)[:4] == ["observing", "paused", "observing", "trying"]


def test_what_is_kept_stays_in_force_while_tuning_is_paused() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)])
    while control.state != "holding":
        train(machine, control, 1)
    ask(control, "pause-tuning")
    train(machine, control, 2000)
    assert machine.factors == {"good": 0.5}
    assert not [kind for kind, _ in machine.told if kind == "recheck"]
    control.finish()
    assert machine.factors == {}, "the end of the script undoes it, paused or not"


def test_an_alarm_of_the_loss_does_not_end_a_pause() -> None:
    machine = Machine()
    training = Training(machine)
    fewer = Change(machine, "fewer-bits", factor=0.5, safety=Safety.PRECISION)
    control = tuned(machine, training, fewer, Change(machine, "late", factor=0.5, not_before=1000))
    while control.state != "holding":
        train(machine, control, 1)
    ask(control, "pause-tuning")
    train(machine, control, 10)
    training.wrong = lambda: math.nan
    train(machine, control, 1)
    assert machine.factors == {}
    training.wrong = lambda: None
    train(machine, control, 2000)
    assert (control.state, machine.factors) == ("paused", {})
    ask(control, "resume-tuning")
    train(machine, control, 1000)
    assert set(machine.factors) == {"late"}


def test_an_action_is_undone_and_not_tried_again() -> None:
    machine = Machine()
    good, better = Change(machine, "good", factor=0.7), Change(machine, "better", factor=0.5)
    control = controller(machine, [good, better])
    train(machine, control, 1500)
    assert set(machine.factors) == {"good", "better"}
    ask(control, "undo", "good")
    train(machine, control, 600)
    assert set(machine.factors) == {"better"}
    assert machine.last("dropped") == {"action": "good", "reason": "asked for in the dashboard"}
    assert good.calls.count("apply") == good.calls.count("undo")
    ask(control, "undo", "good")
    train(machine, control, 5)
    assert answers(machine)[-1] == ("undo", "refused", "good is not in force")


def test_what_needs_leave_is_tried_once_it_has_it() -> None:
    machine = Machine()
    exact = Change(machine, "exact-fix", factor=0.8)
    other = Change(machine, "fewer-bits", factor=0.5, safety=Safety.PRECISION)
    control = controller(machine, [exact, other])
    train(machine, control, 1500)
    assert machine.outcomes() == {"exact-fix": "kept", "fewer-bits": "not_allowed"}
    ask(control, "allow", "precision")
    train(machine, control, 1500)
    assert machine.outcomes() == {"exact-fix": "kept", "fewer-bits": "kept"}
    assert set(machine.factors) == {"exact-fix", "fewer-bits"}
    assert control.state == "holding"
    ask(control, "allow", "precision")
    train(machine, control, 5)
    assert answers(machine)[-1] == ("allow", "refused", "precision is allowed already")


def test_leave_that_is_taken_back_undoes_what_needed_it() -> None:
    machine = Machine()
    actions = [
        Change(machine, "exact-fix", factor=0.7),
        Change(machine, "fewer-bits", factor=0.5, safety=Safety.PRECISION),
    ]
    control = controller(machine, actions, policy=Policy(allowed=frozenset({Safety.PRECISION})))
    train(machine, control, 1500)
    assert set(machine.factors) == {"exact-fix", "fewer-bits"}
    ask(control, "forbid", "precision")
    train(machine, control, 600)
    assert set(machine.factors) == {"exact-fix"}
    ask(control, "forbid", "exact")
    train(machine, control, 5)
    assert machine.factors == {}
    assert [state for _, state, _ in answers(machine)] == ["done", "done"]


def test_a_command_in_the_middle_of_a_trial_waits_for_its_end() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "a", factor=0.5), Change(machine, "b", factor=0.9)])
    while control.state != "trying":
        train(machine, control, 1)
    ask(control, "pause-tuning")
    train(machine, control, 2)
    assert answers(machine) == []
    while not answers(machine):
        train(machine, control, 1)
    assert machine.outcomes() == {"a": "kept"}
    train(machine, control, 500)
    assert machine.outcomes() == {"a": "kept"}


def test_what_was_forbidden_is_tried_again_once_it_is_allowed_again() -> None:
    machine = Machine()
    actions = [
        Change(machine, "exact-fix", factor=0.7),
        Change(machine, "fewer-bits", factor=0.5, safety=Safety.PRECISION),
    ]
    control = controller(machine, actions, policy=Policy(allowed=frozenset({Safety.PRECISION})))
    train(machine, control, 1500)
    ask(control, "forbid", "precision")
    train(machine, control, 600)
    assert set(machine.factors) == {"exact-fix"}
    ask(control, "allow", "precision")
    train(machine, control, 1500)
    assert set(machine.factors) == {"exact-fix", "fewer-bits"}
    tuning = told_by(machine)
    assert sorted(trial.action for trial in tuning.kept) == ["exact-fix", "fewer-bits"]
    assert tuning.dropped == {}


def told_by(machine: Machine) -> Tuning:
    events = [(0, 0, kind, detail) for kind, detail in machine.told]
    tuning = tuning_of(RankLog(path=Path(), steps=np.zeros((0, len(COLUMNS)), np.int64), events=events))
    assert tuning is not None
    return tuning


def test_a_speedup_that_was_measured_with_more_than_is_kept_is_not_told_any_more() -> None:
    machine = Machine()
    actions = [Change(machine, "good", factor=0.7), Change(machine, "better", factor=0.5)]
    control = controller(machine, actions)
    train(machine, control, 1500)
    both = told_by(machine).confirmation
    assert both is not None and both.speedup > 2.5
    ask(control, "undo", "better")
    train(machine, control, 5)
    assert (told_by(machine).confirmation, told_by(machine).rechecks) == (None, ())
    train(machine, control, 1500)
    assert told_by(machine).rechecks[-1].speedup == pytest.approx(1 / 0.7, rel=0.1)


def test_a_single_fix_that_was_not_confirmed_is_no_plural() -> None:
    machine = Machine()
    machine.told.append(("tuning", {"state": "trying", "step": 0}))
    kept = {"safety": "exact", "outcome": "kept", "reason": "", "predicted": None, "measured": None}
    machine.told.append(("trial", {"action": "one", **kept}))
    assert verdict(told_by(machine)) == "1 fix kept; the script ended before it was confirmed"


def test_what_is_kept_after_a_confirmation_leaves_that_to_the_first_ones() -> None:
    machine = Machine()
    machine.told.append(("tuning", {"state": "trying", "step": 0}))
    together = {"pairs": 6, "detectable": 1.2, "without_ns": 17.0, "with_ns": 10.0}
    confirmation = {"speedup": 1.7, "low": 1.5, "high": 2.0, **together}
    kept = {"safety": "exact", "outcome": "kept", "reason": "", "predicted": None, "measured": None}
    for name in ("one", "two"):
        machine.told.append(("trial", {"action": name, **kept}))
    machine.told.append(("confirmation", confirmation))
    machine.told.append(("trial", {"action": "three", **kept}))
    tuning = told_by(machine)
    assert (tuning.confirmation, tuning.num_earlier) == (None, 2)
    assert verdict(tuning) == (
        "tuned to 1.7x (1.5 to 2.0) of its speed with 2 fixes, confirmed on against off; 1 more kept since"
    )
    machine.told.append(("dropped", {"action": "two", "reason": "it gave itself up"}))
    assert told_by(machine).earlier is None
    assert verdict(told_by(machine)) == "2 fixes kept; the script ended before they were confirmed together"
    machine.told.append(("confirmation", confirmation))
    assert verdict(told_by(machine)).endswith("with 2 fixes, confirmed on against off")


def test_what_is_kept_after_everything_was_undone_counts() -> None:
    machine = Machine()
    actions = [Change(machine, "first", factor=0.5), Change(machine, "second", factor=0.6)]
    control = controller(machine, actions)
    train(machine, control, 1500)
    trials = [detail for kind, detail in machine.told if kind == "trial"]
    machine.told.append(("undone", {"reason": "slower"}))
    assert told_by(machine).kept == () and told_by(machine).undone == "slower"
    machine.told.append(("trial", trials[0]))
    tuning = told_by(machine)
    assert [trial.action for trial in tuning.kept] == [trials[0]["action"]]
    assert (tuning.undone, tuning.dropped) == ("", {trials[1]["action"]: "slower"})


def test_a_command_does_not_wait_until_another_trial_is_affordable() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "a", factor=0.5), Change(machine, "b", factor=0.9)])
    while not machine.outcomes():
        train(machine, control, 1)
    control._course.spending.spent_ns = 1e15
    train(machine, control, 400)
    assert machine.outcomes() == {"a": "kept"}
    ask(control, "undo", "a")
    train(machine, control, 2)
    assert answers(machine) == [("undo", "done", "")]
    assert machine.factors == {}
    ask(control, "pause-tuning")
    train(machine, control, 2)
    assert control.state == "paused"
    control._course.spending.spent_ns = 0
    ask(control, "resume-tuning")
    train(machine, control, 500)
    assert "b" in machine.outcomes()


def test_commands_after_the_end_of_tuning_are_refused() -> None:
    machine = Machine()
    control = controller(machine, [])
    ask(control, "pause-tuning")
    control.finish()
    assert answers(machine) == [("pause-tuning", "refused", "tuning has ended")]


def test_a_run_that_reuses_settings_tries_nothing_new() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)], reuse=[Kept(action="good")])
    train(machine, control, 200)
    ask(control, "allow", "precision")
    train(machine, control, 600)
    assert answers(machine)[0][1] == "refused"
    assert machine.factors == {"good": 0.5}


@pytest.mark.parametrize("command", ["pause-tuning", "undo", "forbid"])
@pytest.mark.parametrize("at", [3, 40, 120, 260, 700, 1200])
def test_whatever_is_asked_whenever_the_end_undoes_everything(command: str, at: int) -> None:
    argument = {"undo": "a", "forbid": "exact"}.get(command, "")
    machine = Machine(seed=at)
    actions = [Change(machine, "a", factor=0.5), Change(machine, "b", factor=0.6)]
    control = controller(machine, actions, [lead("a"), lead("b")])
    train(machine, control, at)
    ask(control, command, argument)
    train(machine, control, 300)
    control.finish()
    assert machine.factors == {}
    for action in actions:
        assert action.calls.count("apply") == action.calls.count("undo")
        assert action.calls.count("prepare") == action.calls.count("unprepare")


class Together:
    """The second rank of two, as seen from one plan: it says what the first does, and is asked no more."""

    rank = 1
    num = 2

    def __init__(self, asked: deque[list[dict[str, str]]]) -> None:
        self.asked = asked

    def exchange(self, about: str, value: Any, *, dear: bool = False) -> list[Any]:
        if about == "commands":
            return [self.asked.popleft() if self.asked else [], value]
        return [value, value]

    def leave(self, reason: str) -> None:
        pass


def test_every_rank_does_what_the_first_was_asked_for() -> None:
    machine = Machine()
    asked = deque([[], [{"command": "pause-tuning", "argument": ""}]])
    control = controller(machine, [Change(machine, "a", factor=0.5)], ranks=Together(asked))
    ask(control, "undo", "a")  # on a rank that is not the first nobody is asked
    control._world.commands.clear()
    train(machine, control, 20)
    assert control._orders.paused is False
    control._orders._obey()
    control._orders._obey()
    assert control._orders.paused is True
    assert answers(machine) == [("pause-tuning", "done", "")]


def test_what_another_rank_was_asked_for_is_done_too() -> None:
    machine = Machine()
    control = controller(machine, [], ranks=Together(deque()))
    ask(control, "pause-tuning")
    control._orders._obey()
    assert control._orders.paused is True
    assert answers(machine) == [("pause-tuning", "done", "")]


# -- a real job

ASKS_ITSELF = """
import os, time
from pathlib import Path
import torch
from diagnose.core.command import Command
from diagnose.launch.control import send

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
folder = Path(os.environ["DIAGNOSE_RUN"])
asked = False
until = time.monotonic() + 30
for batch in torch.utils.data.DataLoader(torch.ones(10**6, 4), batch_size=2):
    optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()
    if not asked and (folder / "rank0.sqlite").exists():
        asked = True
        send(folder, Command(command="deep-window"))
        send(folder, Command(command="pause-tuning"))
    left = asked and bool(list(folder.glob("*.window.json")))
    if left or time.monotonic() > until:
        break
print("done", left)
"""


def test_a_running_job_answers_in_its_own_record(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", ASKS_ITSELF)
    ended = run(*DIAGNOSE, "--name", "r", script, cwd=tmp_path)
    assert (ended.code, ended.stdout) == (0, "done True\n")
    log = read_rank(tmp_path / ".diagnose" / "runs" / "r" / "rank0.sqlite")
    told = [(detail["command"], detail["state"]) for _, _, kind, detail in log.events if kind == "command"]
    assert told == [
        ("deep-window", "received"),
        ("pause-tuning", "received"),
        ("pause-tuning", "refused"),
        ("deep-window", "done"),
    ]
    reasons = [d["reason"] for _, _, kind, d in log.events if kind == "command" and d["state"] == "refused"]
    assert reasons == ["this run is not tuned: start it with --tune"]
    states = [detail["state"] for _, _, kind, detail in log.events if kind == "deep-window"]
    assert states == ["begun", "ended"]
    assert log.meta["takes_commands"] is True


@pytest.mark.extended
def test_a_deep_window_waits_until_no_fix_is_being_tried_and_says_so(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", ASKS_ITSELF)
    ended = run(*DIAGNOSE, "--tune", "--name", "r", script, cwd=tmp_path)
    assert (ended.code, ended.stdout) == (0, "done True\n"), ended.stderr
    log = read_rank(tmp_path / ".diagnose" / "runs" / "r" / "rank0.sqlite")
    told = [detail for _, _, kind, detail in log.events if kind == "command"]
    assert [detail["state"] for detail in told if detail["command"] == "deep-window"] == [
        "received",
        "waiting",
        "done",
    ]
    assert "as soon as no fix is being tried" in next(d["reason"] for d in told if d["state"] == "waiting")
    kinds = [
        (kind, detail["state"]) for _, _, kind, detail in log.events if kind in ("tuning", "deep-window")
    ]
    assert kinds.index(("tuning", "paused")) < kinds.index(("deep-window", "begun"))
