"""Time spent in an operator is charged to the operator's line, not to the call behind it."""

from __future__ import annotations

import dis
import os
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import pytest
import torch

from diagnose.hooks import _frames
from diagnose.hooks._frames import owner, resolve, user_stack
from diagnose.hooks._skid import entry, operator_before


def charged(*lines: str) -> int:
    """Number, from 1, of the line that is charged when `call`, on the last line, has just begun."""
    text = "def caller(call, a, b, c):\n" + "".join(f"    {line}\n" for line in lines)
    scope: dict[str, object] = {}
    exec(compile(text, "<string>", "exec"), scope)
    seen: list[int] = []

    def call(*args: object) -> None:
        frame = sys._getframe(1)
        owner(frame.f_code)
        offset = operator_before(frame.f_code, frame.f_lasti)
        seen.append(resolve(id(frame.f_code), offset)[1] - 1)

    scope["caller"](call, {1: 2, 2: 2, 3: 2}, 2, [3])  # type: ignore[operator]
    return seen[-1]


def test_an_operator_before_a_call_is_charged():
    assert charged("x = a[b]", "call(x)") == 1
    assert charged("x = b / 3", "y = x", "call(y)") == 1
    assert charged("y = b == 3", "call(y)") == 1
    assert charged("a[b] = 1", "call(a)") == 1
    assert charged("for _ in range(2):", "    x = b * b", "    call(x)") == 2


def test_of_several_operators_the_first_is_charged():
    assert charged("x = a[b]", "y = x + 1", "call(y)") == 1


def test_a_slice_or_an_element_is_too_short_to_be_charged():
    assert charged("x = c[:2]", "call(x)") == 2
    assert charged("x = c[0]", "call(x)") == 2
    assert charged("x = c[:2]", "y = b * b", "call(x)") == 2


def test_without_an_operator_the_call_is_charged():
    assert charged("x = b", "call(x)") == 2


def test_another_call_in_between_is_charged_for_what_it_did_last():
    assert charged("x = b + 1", "len(c)", "call(x)") == 2
    assert charged("for _ in range(2):", "    len(c)", "call(c)") == 3, "going back, a loop looks"


def test_a_function_that_works_in_c_and_then_calls_python_is_charged_itself():
    after_a_call = ("x = range(2)", "y = sorted(c, key=call)")
    assert charged(*after_a_call) == (2 if sys.version_info >= (3, 11) else 1)
    assert charged("len(c)", "z = list(map(call, c))") == charged(*after_a_call)


def test_the_way_back_of_a_loop_belongs_to_what_came_before():
    text = "def loop(a):\n    for _ in range(2):\n        with open(a) as b:\n            b.read()\n"
    scope: dict[str, Callable[[str], None]] = {}
    exec(compile(text, "<string>", "exec"), scope)
    code = scope["loop"].__code__
    ways = [each.offset for each in dis.get_instructions(code) if each.opname.startswith("JUMP_BACKWARD")]
    owner(code)
    assert all(resolve(id(code), way)[1] in (2, 3, 4) for way in ways), "not the line of `def`"


def closure(value: int):
    return lambda: value


def test_a_function_begins_behind_the_making_of_its_cells():
    if sys.version_info < (3, 11):
        assert entry(charged.__code__) == -1
    else:
        assert 0 <= entry(owner.__code__) < entry(charged.__code__), "`charged` makes a cell for `seen`"
        assert entry(closure(1).__code__) > 0


BLOCK = bytes(4_000_000)


def begins(block: bytes) -> int:
    return len(block)


def copy_then_call(times: int) -> None:
    for _ in range(times):
        block = BLOCK + BLOCK
        begins(block)


def copied(block: bytes) -> bytes:
    return block + block


def copied_then_call(times: int) -> None:
    for _ in range(times):
        block = copied(BLOCK)
        begins(block)


@pytest.mark.parametrize("loop", [copy_then_call, copied_then_call], ids=lambda loop: loop.__name__)
def test_a_signal_during_an_operator_is_charged_to_it_or_to_the_call_that_ended_with_it(
    loop: Callable[[int], None],
):
    lines: list[tuple[int, str]] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        # On a busy machine this handler took 2 ms, too.
        if frame is not None and frame.f_code is not handle.__code__:
            _, _, _, *user = user_stack(0, frame)
            lines.append(resolve(user[0], user[1])[1:])

    previous = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        loop(100)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    first = loop.__code__.co_firstlineno
    on_the_operator = [line for line in lines if line == (first + 2, loop.__name__)]
    assert len(lines) > 5, f"the machine took less than 10 ms to copy {100 * 8} MB?"
    assert len(on_the_operator) > 0.8 * len(lines), lines


def test_a_function_that_is_under_way_is_charged_itself():
    frame = sys._getframe()
    _, _, _, code, instruction, *_ = user_stack(0, frame)
    here = "test_a_function_that_is_under_way_is_charged_itself"
    first = sys._getframe().f_code.co_firstlineno
    assert resolve(code, instruction) == (os.path.abspath(__file__), first + 2, here)


def test_a_sample_may_fall_into_the_first_look_at_its_own_code(monkeypatch: pytest.MonkeyPatch):
    scope: dict[str, object] = {"see": lambda: sys._getframe(1)}
    exec(compile("def fresh():\n    return see()\n", "<string>", "exec"), scope)
    frame = scope["fresh"]()  # type: ignore[operator]
    samples: list[tuple[int, ...]] = []

    def entry_with_a_sample(code: CodeType) -> int:
        monkeypatch.undo()
        samples.append(user_stack(1, frame))
        return entry(code)

    monkeypatch.setattr(_frames, "entry", entry_with_a_sample)
    assert owner(frame.f_code) == _frames.USER
    assert samples[0][:5] == (1, 0, 0, id(frame.f_code), frame.f_lasti)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before, nothing tells what has just begun")
def test_reading_a_line_of_text_is_charged_to_its_own_line():
    """C reads, then calls Python's decoder: what has just begun was called at the end of reading."""
    scope: dict[str, object] = {}
    exec(compile("def caller(file, b):\n    b * b\n    file.readline()\n", "<string>", "exec"), scope)
    seen: list[tuple[int, ...]] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is _frames._DECODES:
            assert frame.f_lasti == entry(frame.f_code)
            seen.append(user_stack(0, frame))

    with open(__file__, encoding="utf-8") as file:
        before = sys.gettrace()
        sys.settrace(look)
        try:
            scope["caller"](file, 2)  # type: ignore[operator]
        finally:
            sys.settrace(before)
    assert [resolve(*key[3:5])[1] for key in seen] == [3]


def test_our_own_files_are_no_package_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They lie beside those packages in every environment but the one we work in."""
    packages = "/env/lib/python3.11/site-packages/"
    monkeypatch.setattr(_frames, "_OURS", (f"{packages}diagnose/",))
    assert _frames.file_owner(f"{packages}diagnose/hooks/backward.py") == _frames.INTERNAL
    assert _frames.file_owner(f"{packages}diagnoser/loops.py") == _frames.LIBRARY
    assert _frames.file_owner(torch.nn.__file__) == _frames.INTERNAL
    assert _frames.file_owner(torch.profiler.__file__) == _frames.LIBRARY
