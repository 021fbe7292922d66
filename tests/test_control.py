"""Commands to a running job: what they are, and how they are handed over as files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from diagnose.core.command import COMMANDS, Command
from diagnose.launch.control import FOLDER, Inbox, send
from diagnose.store.reader import read_rank
from tests.running import DIAGNOSE, run, write

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


@pytest.mark.extended  # a command from the dashboard reaches a real job, too
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
