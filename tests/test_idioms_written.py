"""Lines around what is written, saved or asked for: records, weights by hand, queries, answers."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import HOOK, LOG, METRIC, PYTHON_LOOP, SAVE, SYNC, WAIT
from diagnose.source.sources import Sources
from tests.marked import FILE, of_marked

RECORDS = """
for x, y in loader:
    out = model(x)
    rows = [[i, float(p), int(c)] for i, (p, c) in enumerate(zip(out, y))]  # rows
    record = {{"step": step, "probs": [round(p, 4) for p in out.tolist()]}}  # record
    more = []
    for p in out:  # head
        more.append((step, p.min()))  # more
    found = {made}  # made
    {used}
    loss.backward()
"""
MADE = "[describe(p) for p in out]"


@pytest.mark.parametrize(
    ("mark", "made", "used", "logs"),
    [
        ("rows", MADE, "table.writerows(rows)", True),
        ("rows", MADE, "db.executemany('insert into t values (?, ?, ?)', rows)", True),
        ("rows", MADE, "table.writerows(rows); print(len(rows)); rows.clear()", True),
        ("record", MADE, "fh.write(json.dumps(record) + '\\n')", True),
        ("record", MADE, "json.dump(record, fh)", True),
        ("head", MADE, "table.writerows(more)", True),
        ("more", MADE, "table.writerows(more)", True),
        ("made", MADE, "table.writerows(found)", True),
        ("rows", MADE, "pass", False),
        ("rows", MADE, "table.writerows(rows); replay.extend(rows)", False),
        ("rows", MADE, "table.writerows(rows); total = sum(rows)", False),
        ("record", MADE, "answer = ask(json.dumps(record))", False),
        ("record", MADE, "sock.sendall(json.dumps(record).encode())", False),
        ("record", MADE, "log.info(json.dumps(record))", True),
        ("made", "assess(out, y)", "table.writerow(found)", False),
        ("made", "assess(out, y)", "fh.write(json.dumps(found))", False),
        (
            "made",
            "[[os.path.join(folder, n), round(p, 4)] for n, p in out]",
            "table.writerows(found)",
            True,
        ),
        (
            "made",
            "[[i, Levenshtein.distance(p, t)] for i, (p, t) in rows]",
            "table.writerows(found)",
            False,
        ),
        ("made", "{'ratio': fuzz.ratio(out, y), 'step': step}", "json.dump(found, fh)", False),
        ("made", "[]; found.append((k, pesq(rate, out, y)))", "table.writerows(found)", False),
        ("made", "[accuracy(p, c) for p, c in zip(out, y)]", "table.writerow(found)", False),
    ],
)
def test_records_that_are_only_made_to_be_written_are_logging(mark: str, made: str, used: str, logs: bool):
    text = RECORDS.format(made=made, used=used)
    assert (LOG in of_marked(text.replace(f"# {mark}", "# here"))) is logs


SINK = """
class Journal:
    def __init__(self, path):
        self.sink = {}

    def put(self, out):
        rows = [f"{{p:.3f}}" for p in out]  # here
        self.sink.write("\\n".join(rows))
"""


def test_a_file_that_was_opened_in_another_function_is_one():
    assert of_marked(SINK.format("open(path, 'w')")) == (LOG,)
    assert of_marked(SINK.format("Memory(path)")) == (PYTHON_LOOP,)


WEIGHTS = """
def keep(model, path):
    with open(path, "wb") as book:
        for name, p in model.{over}():
            book.write({written})  # here
"""


@pytest.mark.parametrize(
    ("over", "written", "idiom"),
    [
        ("named_parameters", "p.detach().cpu().numpy().tobytes()", SAVE),
        ("state_dict().items", "p.numpy().tobytes()", SAVE),
        ("named_parameters", "f'{name} {p.norm():.3f}'", LOG),
        ("named_parameters", "p.grad.numpy().tobytes()", LOG),
        ("named_parameters", "p.abs().mean().numpy().tobytes()", LOG),
        ("named_parameters", "seen[name].numpy().tobytes()", LOG),
        ("named_buckets", "p.numpy().tobytes()", LOG),
    ],
)
def test_weights_that_are_written_as_bytes_are_saved(over: str, written: str, idiom: str):
    found = of_marked(WEIGHTS.format(over=over, written=written))
    assert {SAVE, LOG} & set(found) == {idiom}


WEIGHT_LISTS = "weights = {k: v.tolist() for k, v in model.state_dict().items()}"


@pytest.mark.parametrize(
    ("statements", "idiom"),
    [
        ("p.detach().numpy().tofile(book)  # here", SAVE),
        (f"{WEIGHT_LISTS}  # here\n    json.dump(weights, book)", SAVE),
        (f"{WEIGHT_LISTS}\n    json.dump(weights, book)  # here", SAVE),
        (f"{WEIGHT_LISTS}\n    book.write(json.dumps(weights))  # here", SAVE),
        ("json.dump({k: v.tolist() for k, v in model.state_dict().items()}, book)  # here", SAVE),
        ("wire.sendall(json.dumps([w.tolist() for w in model.parameters()]).encode())  # here", LOG),
        ("json.dump({k: v.norm().item() for k, v in model.state_dict().items()}, book)  # here", LOG),
        (f"losses = x.tolist()\n    json.dump(losses, book)  # here\n    {WEIGHT_LISTS}", LOG),
    ],
)
def test_weights_that_are_written_as_numbers_are_saved(statements: str, idiom: str):
    found = of_marked(f"for p in model.parameters():\n    {statements}\n")
    assert {SAVE, LOG} & set(found) == {idiom}


ANSWERS = """
from urllib.request import Request, urlopen
for x in loader:
    {}
"""


@pytest.mark.parametrize(
    ("statement", "idioms"),
    [
        ("rate = requests.get(self.url).json()['rate']  # here", (WAIT,)),
        ("row = self.session.get(url)  # here\n    y = x + row.json()['shift']", (WAIT,)),
        ("row = self.session.get(url)  # here\n    rows.append(row.json())", (WAIT,)),
        ("row = requests.get(url)  # here\n    if row.json()['stop']:\n        break", (WAIT,)),
        ("row = requests.get(url)  # here\n    if row.ok:\n        rate = float(row.text)", (WAIT,)),
        ("self.row = requests.get(url)  # here", (WAIT,)),
        ("row = requests.get(url)  # here\n    if row.status_code == 200:\n        break", (WAIT,)),
        ("row = requests.get(url)  # here\n    if row.ok and row.json()['stop']:\n        stop()", (WAIT,)),
        ("row = requests.get(url)  # here\n    tracker.update(row.json())", (WAIT,)),
        ("row = requests.get(url)  # here\n    logger.info(row.text)", (LOG,)),
        ("row = requests.get(url)  # here", (LOG,)),
        ("row = requests.get(url)  # here\n    row.raise_for_status()", (LOG,)),
        (
            "row = requests.get(url)  # here\n    if row.status_code != 200:\n        print('not sent')",
            (LOG,),
        ),
        ("row = requests.get(url)  # here\n    if not row.ok:\n        raise IOError(row.text)", (LOG,)),
        ("rate = float(urlopen(url).read())  # here", (WAIT,)),
        (
            "with urlopen(f'http://127.0.0.1:{port}/flags', timeout=5) as reply:  # here\n"
            "        flags = json.load(reply)",
            (WAIT,),
        ),
        ("with urlopen(url) as reply:  # here\n        reply.read()", (LOG,)),
        ("urlopen(url).read()  # here", (LOG,)),
        ("requests.get(url)  # here", (LOG,)),
        ("code = requests.post(url, json=row).status_code  # here", (LOG,)),
        ("code = urlopen(url, body).status  # here", (LOG,)),
        ("code = urlopen(url, data=body).status  # here", (LOG,)),
        ("code = urlopen(Request(url, data=body)).status  # here", (LOG,)),
        ("code = urlopen(request).status  # here", (LOG,)),
        ("text = subprocess.getoutput('uptime')  # here", (WAIT,)),
        ("os.waitpid(child, 0)  # here", (WAIT,)),
        ("ended, status = os.waitpid(child, os.WNOHANG)  # here", (PYTHON_LOOP,)),
    ],
)
def test_a_server_whose_answer_is_used_is_waited_for(statement: str, idioms: tuple[str, ...]):
    found = of_marked(ANSWERS.format(statement))
    assert tuple(idiom for idiom in found if idiom != SYNC) == idioms


def test_a_message_that_a_function_sends_by_asking_is_logged():
    text = """
def log_progress(text):
    response = requests.get(f"https://api.telegram.org/bot{TOKEN}/sendMessage?text={text}")  # here
    if response.status_code != 200:
        print("not sent")
"""
    assert of_marked(text, "log_progress") == (LOG,)
    assert of_marked(text.replace('print("not sent")', "return response"), "log_progress") == (WAIT,)


@pytest.mark.parametrize(
    "function", ["MetricsClient.push", "report_status", "update_ema", "log_row", "AverageMeter.update"]
)
def test_a_wait_is_one_whatever_its_function_is_called(function: str):
    text = "def push(self, step):\n    self.sock.recv(2)  # here\n"
    assert of_marked(text, function) == (WAIT,)
    assert WAIT not in of_marked(text.replace("recv", "fileno"), function)


@pytest.mark.parametrize(
    ("answers", "waits"), [("return self.pipe.recv()", True), ("self.other.recv()", False)]
)
def test_asking_is_a_wait_where_the_same_function_receives_the_answer(answers: str, waits: bool):
    text = f"def ask(self, state):\n    self.pipe.send(state)  # here\n    {answers}\n"
    assert (WAIT in of_marked(text, "ask")) == waits


QUERIES = """
INSERT = "INSERT INTO losses VALUES (?, ?)"
SELECT = "SELECT value FROM losses WHERE step = ?"

class Book:
    KEEP = f"REPLACE INTO {TABLE} VALUES (?)"

    def put(self, con, row):
        {}  # here
"""


@pytest.mark.parametrize(
    ("statement", "idioms"),
    [
        ("con.execute(INSERT, row)", (LOG,)),
        ("con.execute(self.KEEP, row)", (LOG,)),
        ("con.execute(f'insert into {name} values (?)', row)", (LOG,)),
        ("con.execute(SELECT, row)", ()),
        ("con.execute(query, row)", ()),
        ("plan.execute(self.state, row)", ()),
    ],
)
def test_a_query_is_known_by_the_name_of_its_text(statement: str, idioms: tuple[str, ...]):
    assert of_marked(QUERIES.replace("{}", statement)) == idioms


@pytest.mark.parametrize(
    ("line", "idioms"),
    [
        ("frame.to_sql('losses', con)", (LOG,)),
        ("archive.writestr('maps.csv', text)", (LOG,)),
        ("from torchvision.utils import save_image\nsave_image(x, path)", (LOG,)),
        ("from numpy import savetxt\nsavetxt(path, x)", (LOG,)),
        ("from pictures import save_image\nsave_image(x, path)", ()),
        ("def save_image(x, path): ...\nsave_image(x, path)", ()),
    ],
)
def test_what_writes_files_is_known_by_what_was_imported(line: str, idioms: tuple[str, ...]):
    assert of_marked(f"{line}  # here") == idioms


@pytest.mark.parametrize(
    ("via", "idioms"),
    [
        ("PIL/Image.py:2520 Image.save", (LOG,)),
        ("PIL/ImageFile.py:560 _encode_tile", (LOG,)),
        ("PIL/PngImagePlugin.py:1310 _save", (LOG,)),
        ("PIL/Image.py:2200 Image.resize", ()),
        ("PIL/ImageFile.py:200 ImageFile.load", ()),
    ],
)
def test_the_package_that_writes_a_picture_is_logging(via: str, idioms: tuple[str, ...]):
    assert of_marked("picture.save(path)  # here", via=via) == idioms


COMPRESSES = """
import io

def jpeg_bytes(image):
    out = io.BytesIO()
    image.save(out, "JPEG", quality=95)  # here
    return out.tell()
"""


def test_a_picture_that_is_compressed_into_memory_is_not_logged():
    via = "PIL/ImageFile.py:560 _encode_tile"
    assert of_marked(COMPRESSES, via=via) == ()
    assert of_marked(COMPRESSES.replace("out = io.BytesIO()", "out = open(path, 'wb')"), via=via) == (LOG,)
    given = "def encode(image, buf):\n    image.save(buf, format='PNG')  # here"
    assert of_marked(given, via=via) == ()
    assert of_marked(given.replace("buf", "path"), via=via) == (LOG,)
    looped = "for x in images:\n    with BytesIO() as f:\n        to_pil(x).save(f, 'JPEG')  # here"
    assert LOG not in of_marked(looped, via=via)
    assert LOG in of_marked(COMPRESSES, via="wandb/sdk/data_types/image.py:560 Image.save")


def test_a_picture_that_was_read_out_of_memory_is_logged_where_it_is_saved():
    via = "PIL/ImageFile.py:560 _encode_tile"
    decodes = "for raw in shard:\n    image = Image.open(io.BytesIO(raw))\n    image.save(path)  # here"
    assert LOG in of_marked(decodes, via=via)
    assert of_marked("Image.fromarray(self.frame_buffer[-1]).save(path)  # here", via=via) == (LOG,)


def test_a_package_that_fits_trees_trains_no_network():
    line = "print(forest.fit(rows, y))  # here"
    assert of_marked(line, via="sklearn/tree/_classes.py:472 DecisionTreeClassifier._fit") == (LOG,)
    assert of_marked(line, via="skorch/net.py:1300 NeuralNet.fit_loop") == ()


HOOKS = """
class Watch:
    def __init__(self, model):
        for name, module in model.named_modules():
            module.{register}({given})

    def note(self, module, inputs, output):
        {body}  # here

def noting(name):
    def note(module, inputs, output):
        seen[name].append(output.std().item())  # factory
    return note
"""
NOTES = "scale[name].append(float(output.std()))"
KEEPS = "self.seen[id(module)] = (output.mean().item(), output.abs().max().item())"


@pytest.mark.parametrize(
    ("register", "given", "body", "is_one"),
    [
        ("register_forward_hook", "self.note", KEEPS, True),
        ("register_full_backward_hook", "self.note", KEEPS, True),
        ("register_forward_hook", "functools.partial(self.note, name)", KEEPS, True),
        ("register_forward_hook", "self.note", "self.seen.append(output.detach().view(-1).tolist())", True),
        ("register_forward_hook", "self.other", KEEPS, False),
        ("register_forward_pre_hook", "self.note", KEEPS, False),
        ("register_forward_hook", "self.note", "self.seen[id(module)] = output.detach().mean()", False),
        ("register_forward_hook", "self.note", "self.seen.append(output.float().mean())", False),
        ("register_forward_hook", "self.note", "self.seen.append(float(output.std()))", True),
        ("register_forward_hook", "self.note", "module.scale = output.abs().max().item()", False),
        ("register_forward_hook", "self.note", "output *= self.scale[output.argmax().item()]", False),
        ("register_forward_hook", "self.note", "self.center.lerp_(output, self.rate.item())", False),
        ("register_forward_hook", "self.note", "return output / output.std().item()", False),
        *(
            ("register_forward_hook", "self.note", body.replace("; ", "\n        "), is_one)
            for body, is_one in (
                (f"{NOTES}; features[name] = output", False),
                (f"{NOTES}; self.kept.append(output)", False),
                (f"{NOTES}; self.kept.append((name, output))", False),
                (f"{NOTES}; grams[name] = (f := output.flatten(2)) @ f.mT / f.shape[-1]", False),
                (f"{NOTES}; low, high = output.aminmax(); kept.append(low)", False),
                (f"{NOTES}; x = 0.0; x += output.sum(); kept.append(x)", False),
                ("self.seen.append(output * output.std().item())", False),
                ("self.seen.append([g for g in output]); self.n += len(output) + output[0].item()", False),
                ("value = output.std().item(); self.seen.append((name, self.step, value))", True),
                ("self.seen[name] = {'mean': output.mean().item(), 'n': output.numel()}", True),
                ("self.seen.update({name: [g.norm().item() for g in output]})", True),
                ("self.seen.append(math.sqrt(output.var().item()) / output.shape[0])", True),
                ("writer.add_scalar(name, output.std().item(), self.step)", True),
                ("self.seen.append((self.names[module], output.std().item()))", True),
                ("self.seen.append((module.__class__.__name__, output.std().item()))", True),
                ("self.seen.update({f'{module.name}/std': output.std().item()})", True),
                ("self.seen[name] = 0.9 * self.seen[name] + 0.1 * output.std().item()", True),
                ("y = output[0].std().item() if isinstance(output, tuple) else 0; rows.append(y)", True),
                ("[self.seen.append((i, g.std().item())) for i, g in enumerate(output)]", True),
                ("self.seen.append((module, output.std().item()))", False),
                ("y = output[0] if output.std().item() > 1 else 0; rows.append(y)", False),
            )
        ),
    ],
)
def test_a_hook_of_a_module_that_only_notes_numbers_is_no_part_of_it(
    register: str, given: str, body: str, is_one: bool
):
    text = HOOKS.format(register=register, given=given, body=body)
    found = Idioms(Places(Sources({FILE: text})))
    stack = [(FILE, 8, "Watch.note"), (FILE, 30, "Net.forward"), (FILE, 40, "main")]
    assert (HOOK in found.of(stack, phase=Phase.FORWARD, waits=False)) is is_one
    assert (HOOK in found.of(stack, phase=Phase.BACKWARD, waits=False)) is is_one
    assert HOOK not in found.of(stack, phase=Phase.OTHER)
    assert HOOK not in found.of(stack[1:], phase=Phase.FORWARD)


def test_a_hook_may_be_made_by_a_function_or_on_the_spot():
    text = HOOKS.format(register="register_forward_hook", given="noting(name)", body="pass")
    found = Idioms(Places(Sources({FILE: text})))
    assert found.of([(FILE, 12, "noting.<locals>.note")], phase=Phase.FORWARD, waits=False) == (HOOK,)
    assert found.of([(FILE, 8, "Watch.note")], phase=Phase.FORWARD, waits=False) == ()
    for kept, is_one in (("(n, output.std().item())", True), ("(n, output.detach())", False)):
        text = f"net.register_forward_hook(lambda m, i, output, n=name: seen.append({kept}))  # here"
        found = Idioms(Places(Sources({FILE: text})))
        assert (HOOK in found.of([(FILE, 1, "<lambda>")], phase=Phase.FORWARD, waits=False)) is is_one


@pytest.mark.parametrize("head", ["name, module, inputs, output", "module, inputs, output, name=name"])
def test_what_a_hook_was_bound_to_is_no_tensor(head: str):
    body = "for i, x in enumerate(output):\n        rows.append((name, i, x.mean().item()))"
    text = f"def note({head}):\n    {body}\nnet.register_forward_hook(partial(note, name))"
    found = Idioms(Places(Sources({FILE: text})))
    assert HOOK in found.of([(FILE, 3, "note")], phase=Phase.FORWARD, waits=False)
    kept = Idioms(Places(Sources({FILE: text.replace("x.mean().item()", "x, x.mean().item()")})))
    assert HOOK not in kept.of([(FILE, 3, "note")], phase=Phase.FORWARD, waits=False)


def test_a_metric_that_is_also_written_remains_one():
    assert METRIC in of_marked("table.writerow([step, accuracy(out, y)])  # here")
