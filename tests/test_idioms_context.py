"""What a line is for where other lines tell: how a name was made, who calls, what becomes of it."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import (
    CLIP,
    COLLECT,
    EMA,
    LOG,
    METRIC,
    PYTHON_LOOP,
    SAVE,
    SLICES,
    WAIT,
)
from diagnose.source.sources import Sources
from tests.marked import FILE, of_marked


def test_the_end_of_a_transaction_writes_what_is_in_it():
    text = "with db:  # here\n    for row in rows:\n        db.execute('INSERT INTO t VALUES (?)', row)\n"
    assert of_marked(text) == (LOG,)
    assert of_marked(text.replace("INSERT INTO t VALUES (?)", "SELECT 1")) == ()


CLIPS = """
def clip(self):
    if not self.blocks:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # at once
        return
    for parameter in self.parameters():
        for block in parameter.grad.chunk(self.blocks):
            norm = block.norm()  # by hand
"""


@pytest.mark.parametrize(("line", "idioms"), [("# at once", ()), ("# by hand", (CLIP,))])
def test_a_function_that_clips_in_two_ways_does_so_by_hand_in_one(line: str, idioms: tuple[str, ...]):
    assert of_marked(CLIPS.replace(line, "# here"), "Trainer.clip") == idioms


FEED = """
class Feed:
    def __init__(self):
        self.asked, self.answers = queue.Queue(), queue.Queue()
        self.known = {}

    def level(self, day):
        self.asked.put(day)
        return self.answers.get()  # waits

    def cached(self, day):
        return self.known.get(day)  # looks
"""


@pytest.mark.parametrize(("line", "idioms"), [("# waits", (WAIT,)), ("# looks", ())])
def test_what_was_made_as_a_queue_is_waited_for(line: str, idioms: tuple[str, ...]):
    assert of_marked(FEED.replace(line, "# here")) == idioms


HELPER = """\
def whiten(part):
    return part / part.std()  # here

class Net(nn.Module):
    def forward(self, x):
        return torch.cat([{call} for part in x.{taken}], 1)
"""


@pytest.mark.parametrize(
    ("call", "taken", "outer", "idioms"),
    [
        ("whiten(part)", "unbind(1)", "Net.forward", (PYTHON_LOOP, SLICES)),
        ("whiten(part)", "chunk(3, 1)", "Net.forward", ()),
        ("whiten(x)", "unbind(1)", "Net.forward", ()),
        ("whiten(part)", "unbind(1)", "train", ()),
    ],
)
def test_a_helper_that_a_module_calls_for_each_slice_serves_the_loop(call, taken, outer, idioms):
    text = HELPER.format(call=call, taken=taken)
    found = Idioms(Places(Sources({FILE: text})))
    stack = [(FILE, 2, "whiten"), (FILE, 6, outer), (FILE, 20, "main")]
    assert found.of(stack, phase=Phase.FORWARD) == idioms
    assert found.of(stack, phase=Phase.FORWARD, called=True) == ()
    layer = [(FILE, 2, "Whiten.forward"), *stack[1:]]
    assert found.of(layer, phase=Phase.FORWARD) == ()


@pytest.mark.parametrize(
    ("imports", "call", "idioms"),
    [
        ("import pickle as pkl", "pkl.dump(state, book)", (SAVE,)),
        ("from pickle import dump", "dump(state, book)", (SAVE,)),
        ("from mine import dump", "dump(state, book)", ()),
        ("import numpy as onp", "onp.savez(path, rows)", (SAVE,)),
        ("from gc import collect", "collect()", (COLLECT,)),
    ],
)
def test_what_a_file_imports_is_known_by_any_name(imports: str, call: str, idioms: tuple[str, ...]):
    assert of_marked(f"{imports}\n{call}  # here") == idioms


DURABLE = """
with open(new, "wb") as book:  # opens
    torch.save(state, book)
    book.flush()  # flushes
    os.fsync(book.fileno())  # waits
buffer = BytesIO()
torch.save(state, buffer)
packed = zlib.compress(buffer.getvalue())  # packs
path.write_bytes(packed)  # writes
notes.write(text)  # notes
with open("notes", "a") as notes:  # appends
    notes.write(text)
"""


@pytest.mark.parametrize(
    ("mark", "idiom"),
    [
        ("opens", SAVE),
        ("flushes", SAVE),
        ("waits", SAVE),
        ("packs", SAVE),
        ("writes", SAVE),
        ("notes", LOG),
        ("appends", LOG),
    ],
)
def test_what_is_done_to_a_file_that_state_is_saved_to_is_saving(mark: str, idiom: str):
    assert of_marked(DURABLE.replace(f"# {mark}", "# here")) == (idiom,)


PREDICTIONS = """
def row_of(p):
    return ",".join(f"{{v:.6f}}" for v in p)  # helper

with open("predictions", "w") as fh:
    for x, y in loader:
        out = model(x)
        rows = [f"{{i}},{{row_of(p)}}" for i, p in enumerate(out.tolist())]  # rows
        lines = []
        for p in out.tolist():  # head
            line = row_of(p)  # line
            lines.append(line)
        text = {}  # text
        fh.write("\\n".join(rows) + "\\n".join(lines))
        fh.write({})
        loss.backward()
"""


@pytest.mark.parametrize(
    ("mark", "made", "written", "logs"),
    [
        ("rows", "''", "text", True),
        ("head", "''", "text", True),
        ("line", "''", "text", True),
        ("text", "render(out)", "text", True),
        ("text", "assess(out, y)", "f'{text}'", False),
        ("text", "assess(out, y)", "text); print(text); total += text; len(''", False),
    ],
)
def test_text_that_is_made_to_be_written_is_logging(mark: str, made: str, written: str, logs: bool):
    text = PREDICTIONS.format(made, written)
    assert (LOG in of_marked(text.replace(f"# {mark}", "# here"))) is logs


def test_a_helper_that_formats_what_is_written_is_logging():
    text = PREDICTIONS.format("''", "text")
    for line, idiom in {8: LOG, 11: LOG, 7: PYTHON_LOOP}.items():
        stack = [(FILE, 3, "row_of"), (FILE, line, "<module>")]
        assert Idioms(Places(Sources({FILE: text}))).of(stack) == (idiom,)


@pytest.mark.parametrize(
    ("function", "body", "logs"),
    [
        ("log_loss", "total = -sum(log(s) for s in scores)  # here\n    return total / len(scores)", False),
        (
            "log_rank_test",
            "far = sum(a - b for a, b in pairs)  # here\n    return far ** 2 / spread",
            False,
        ),
        ("Survival.log_rank", "far = sum(a - b for a, b in pairs)  # here\n    return far", False),
        ("log_rank", "far = sum(a - b for a, b in pairs)  # here\n    pairs.sort()\n    return far", False),
        ("log_evidence", "far = sum(a - b for a, b in pairs)  # here\n    return math.log(far)", False),
        # It tells, keeps, or makes what is told.
        ("log_loss", "row = sum(a for a in losses)  # here\n    rows.append(row)", True),
        ("log_loss", "row = sum(a for a in losses)  # here\n    print(row)\n    return row / 2", True),
        (
            "log_step",
            "row = sum(a for a in losses)  # here\n    bus.send('loss', row)\n    return row",
            True,
        ),
        (
            "log_step",
            "row = sum(a for a in losses)  # here\n    await bus.send('loss', row)\n    return row",
            True,
        ),
        ("log_line", "row = ' '.join(str(a) for a in losses)  # here\n    return 'loss ' + row", True),
        ("log_stats", "row = sum(a for a in losses)  # here\n    return {'loss': row}", True),
        ("LossLog.log", "row = sum(a for a in losses)  # here\n    return row", True),
    ],
)
def test_a_function_that_gives_a_number_and_logs_nothing_is_named_for_the_logarithm(
    function: str, body: str, logs: bool
):
    found = of_marked(f"async def f(losses):\n    {body}\n", function, "main")
    assert found == ((LOG,) if logs else (PYTHON_LOOP,))


@pytest.mark.parametrize(
    ("function", "line", "idioms"),
    [
        ("averaged_f1", "score = hits / all  # here", (METRIC,)),
        ("averaged_precision", "score = hits / all  # here", ()),
        ("averaged", "rate = step / all  # here", (EMA,)),
        ("averaged_f1_net", "rate = step / len(net.parameters())  # here", (EMA,)),
    ],
)
def test_averaged_scores_are_no_average_of_weights(function: str, line: str, idioms: tuple[str, ...]):
    assert of_marked(f"def f(step):\n    {line}\n", function, "main") == idioms
