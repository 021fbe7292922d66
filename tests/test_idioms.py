"""What a source line is there for: each by its statement, and by its function's name."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.place import rarer
from diagnose.source.places import Places
from diagnose.source.purposes import (
    CLIP,
    COLLECT,
    EMA,
    HOOK,
    LOG,
    METRIC,
    PYTHON_LOOP,
    SAVE,
    SCHEDULE,
    SYNC,
    SYNCHRONIZE,
    WAIT,
)
from diagnose.source.sources import Sources
from tests.marked import FILE, of_marked


@pytest.mark.parametrize(
    ("line", "idioms"),
    [
        ("t.train(); print('done')", ()),
        ("print('begins'); t.train()", ()),
        ("y = torch.linalg.svd(x); print(y)", ()),
        ("x = 1; print(x)", (LOG,)),
        ("loss.backward(); optimizer.step(); print(loss.item())", (LOG, SYNC)),
        ("print(step); file.write(text)", (LOG,)),
        ("print(loss.item()); total += loss.item()", (SYNC,)),
        ("scheduler.step(); print(step)", ()),
        ("if step % 10 == 0: print(step)", (LOG,)),
        ("if step % 10 == 0: t.train(); print(step)", ()),
        ("with torch.no_grad(): print(step)", (LOG,)),
    ],
)
def test_of_several_statements_on_a_line_none_is_blamed_alone(line: str, idioms: tuple[str, ...]) -> None:
    assert of_marked(f"{line}  # here") == idioms


LOOP = """\
def report(step, loss):
    if verbose:
        print(loss)  # inner
    elif step % 3 == 1:
        print(step)
    else:
        print("rest")

for step, x in enumerate(data):
    print(step)
    if step % 10 == 0: print(step)
    if step and step % args.every == 0:
        for name in names:
            print(name)
        report(step, loss)
    if "%d" % step == "7":
        report(step, loss)
    if (step + 1) % 4 == 0:
        optimizer.step()
        print(step)
    if rank % 8 == 0:
        print(step)
    if step % 2:
        print(step)
"""


@pytest.mark.parametrize(
    ("lines", "condition"),
    [
        ([10], ""),
        ([11], "step % 10 == 0"),
        ([14], "step and step % args.every == 0"),
        ([3, 15], "step and step % args.every == 0"),
        ([5, 15], "step % 3 == 1"),
        ([7, 17], ""),
        ([20], ""),
        ([22], ""),
        ([24], ""),
    ],
)
def test_what_a_line_runs_for_only_every_so_many_steps_is_told(lines: list[int], condition: str) -> None:
    stack = [(FILE, line, "report") for line in lines]
    assert Idioms(Places(Sources({FILE: LOOP}))).every(stack) == condition


@pytest.mark.parametrize(
    ("condition", "tenth"),
    [
        ("step % 10 == 0", "step % 100 == 0"),
        ("step and (step + 1) % 25 == 0", "step and (step + 1) % 250 == 0"),
        ("not step % 7", "not step % 70"),
        ("step % 2 and step % 5 == 0", "step % 2 and step % 50 == 0"),
        ("step % args.every == 0", ""),
    ],
)
def test_a_condition_is_made_to_hold_a_tenth_as_often(condition: str, tenth: str) -> None:
    assert rarer(condition) == tenth


def test_a_line_whose_time_is_a_packages_training_does_nothing_else() -> None:
    """A trainer's loop runs inside the line that calls it."""
    training = "transformers/trainer.py:2520 Trainer._inner_training_loop"
    for line in ("t.train(); print('done')", "print(t.train())", "log.info('%s', t.fit(model))"):
        assert of_marked(f"{line}  # here", via=training) == ()
    assert of_marked("print(t.train())  # here", via="ipykernel/iostream.py:10 OutStream.write") == (LOG,)


@pytest.mark.parametrize(
    ("statement", "idioms"),
    [
        ("running += loss.item()", (SYNC,)),
        ("losses.append(float(loss))", (SYNC,)),
        ("values = out.detach().cpu().numpy()", (SYNC,)),
        ("values = out.to('cpu')", (SYNC,)),
        ("history.extend(loss.tolist())", (SYNC,)),
        ("print(rows, file=self.helper.stdin, flush=True)", (WAIT,)),
        ("helper.stdin.write(text)", (WAIT,)),
        ("answer = helper.stdout.readline()", (WAIT,)),
        ("rows = connection.recv()", (WAIT,)),
        ("dist.recv(rows, src=0)", ()),
        ("stopped = self.stop.wait(0.005)", (WAIT,)),
        ("writer_thread.join()", (WAIT,)),
        ("rows = future.result()", (WAIT,)),
        ("ready = select.select([console], [], [], 0.01)", (WAIT,)),
        ("rows = torch.select(x, 0, step)", ()),
        ("rows = self.work_queue.get()", (WAIT,)),
        ("value = settings.get('lr')", ()),
        ("fcntl.flock(book, fcntl.LOCK_EX)", (WAIT,)),
        ("handle.wait()", ()),
        ("text = ', '.join(names)", ()),
        ("path = os.path.join(folder, name)", ()),
        ("print(rows, file=book)", (LOG,)),
        ("sys.stdout.write(text)", (LOG,)),
        ("print(loss.item())", (LOG, SYNC)),
        ("print(f'{step}: {loss}')", (LOG,)),
        ("logger.info('step %d', step)", (LOG,)),
        ("writer.add_scalar('loss', value, step)", (LOG,)),
        ("wandb.log({'loss': value})", (LOG,)),
        ("self.log('loss', value)", ()),
        ("accelerator.print(step)", (LOG,)),
        ("file.write(text)", (LOG,)),
        ("json.dump(row, file)", (LOG,)),
        ("os.fsync(file.fileno())", (LOG,)),
        ("journal.debug('step %d: %.3f', step, value)", (LOG,)),
        ("book.info(row)", ()),
        ("np.savetxt(path, picture)", (LOG,)),
        ("frame.to_csv(path)", (LOG,)),
        ("log.error('no rows at %d', step)", (LOG,)),
        ("requests.post(url, json=row)", (LOG,)),
        ("db.execute('insert into scalars values (?, ?)', row)", (LOG,)),
        ("db.execute('select value from scalars')", ()),
        ("connection.commit()", (LOG,)),
        ("torch.cuda.synchronize()", (SYNCHRONIZE,)),
        ("torch.cuda.empty_cache()", (SYNCHRONIZE,)),
        ("gc.collect()", (COLLECT,)),
        ("time.sleep(0.01)", (WAIT,)),
        ("while time.monotonic() < due: pass", (WAIT,)),
        ("while not os.path.exists(path) and time.time() < due: time.sleep(0.01)", (WAIT,)),
        ("while refined(mesh): pass", (PYTHON_LOOP,)),
        ("while not mesh.done(): mesh = refined(mesh)", (PYTHON_LOOP,)),
        ("pickle.dump(state, file)", (SAVE,)),
        ("scheduler.step()", (SCHEDULE,)),
        ("ema_model.update_parameters(model)", (EMA,)),
        ("task.update_ema(step=step)", (EMA,)),
        ("ema_unet.step(unet.parameters())", (EMA,)),
        ("total = sum(p.grad.norm() ** 2 for p in model.parameters())", (CLIP,)),
        ("clip_grad_norm_(model.parameters(), 1.0, foreach=False)", (CLIP,)),
        ("accuracy.update(out, labels)", (METRIC,)),
        ("torch.save(picture.clone(), path)", (SAVE,)),
        ("os.replace(fresh, path)", (SAVE,)),
        ("hits = (out.argmax(1) == labels).float().mean()", (METRIC,)),
        ("score = f1_score(labels, predicted)", (METRIC,)),
        ("self.errors.update(found, true)", (METRIC,)),
        ("worst = joint_errors(found, true).max()", (METRIC,)),
        ("squares = sum(i * i for i in range(1000))", (PYTHON_LOOP,)),
        ("logger.logkv('loss', value)", (LOG,)),
        ("logger.logkv_mean(key, values.mean().item())", (LOG, SYNC)),
        ("self._logger.video('open', frames)", (LOG,)),
        ("writer.add_audio(key, wave, step)", (LOG,)),
        ("self.logger.experiment.add_embedding(z)", (LOG,)),
        ("metric_logger.update(loss=loss.item())", (SYNC,)),
        ("metric_logger.update(lr=rate)", ()),
        ("metric_logger.synchronize_between_processes()", ()),
        ("wandb.watch(model)", ()),
        ("wandb.define_metric('loss')", ()),
        ("logger.reset()", ()),
        ("logger.addHandler(handler)", ()),
        ("level = logger.getEffectiveLevel()", ()),
        ("accelerator.wait_for_everyone()", ()),
        ("board.push(move)", ()),
        ("logger.model.train_step(x)", ()),
        ("book = open(path)", ()),
        ("book = open(path, 'rb')", ()),
        ("book = open(path, mode='r')", ()),
        ("book = open(path, 'a')", (LOG,)),
        ("book = open(path, 'r+')", (LOG,)),
        ("book = open(path, mode=mode)", (LOG,)),
        ("book = path.open('a')", (LOG,)),
        ("book = path.open()", ()),
        ("book = path.open('rb')", ()),
        ("book = gzip.open(path, 'at')", (LOG,)),
        ("book = h5py.File(path, 'a')", (LOG,)),
        ("picture = Image.open('a.png')", ()),
        ("Image.fromarray(rows).save(folder / f'{step}.png')", (LOG,)),
        ("canvas.export(os.path.join(folder, f'{step}.svg'))", (LOG,)),
        ("engine.keep(f'{folder}/{step}.pt')", (SAVE,)),
        ("os.remove(folder / f'{step}.png')", ()),
        ("book.add(f'{part}.loss', value)", ()),
        ("joblib.dump(state, path)", (SAVE,)),
        ("p.join()", (WAIT,)),
        ("runner.join(timeout=3)", (WAIT,)),
        ("np.savez_compressed(path, rows)", (SAVE,)),
        ("safetensors.torch.save_file(state, path)", (SAVE,)),
        ("model.save_pretrained(path)", (SAVE,)),
        ("engine.save_checkpoint(path)", (SAVE,)),
        ("swa.update_parameters(model, step)", ()),
        ("self.scheduler.step_update(step)", (SCHEDULE,)),
        ("lr_scheduler.update(step)", (SCHEDULE,)),
        ("self.sched.update_lr()", (SCHEDULE,)),
        ("schedules.update({'lr': rate})", ()),
        ("self.schedule_sampler.update_with_local_losses(t, losses)", ()),
        ("optimizer.param_groups[0]['lr'] = rate", (SCHEDULE,)),
        ("optimizer.param_groups[0].update(lr=rate)", (SCHEDULE,)),
        ("settings.update(lr=rate)", ()),
        ("settings['lr'] = rate", ()),
        ("raise ValueError('no rows')", ()),
        ("raise NotImplementedError(accuracy(out, y))", ()),
        ("failed = ValueError('no rows')", ()),
        ("torch.set_float32_matmul_precision('high')", ()),
        ("classifier.cpu()", ()),
        ("classifier.to('cpu')", ()),
        ("x = int(input('how many? ').strip())", ()),
        ("x = int(line.split('_')[1])", ()),
        ("x = float(loss_of(out).mean())", (SYNC,)),
        # Neighbours that are none of them.
        ("clip_grad_norm_(model.parameters(), 1.0)", ()),
        ("loss = -out.log().mean()", ()),
        ("loss = torch.log(out).mean()", ()),
        ("value = math.log(2)", ()),
        ("x = float(1)", ()),
        ("xs = list(map(f, ys))", ()),
        ("loss.backward()", ()),
        ("optimizer.step()", ()),
        ("x, y = x.to(device), y.to(device)", ()),
        ("total = sum(p.numel() for p in model.parameters())", (PYTHON_LOOP,)),
    ],
)
def test_a_statement_of_the_loop_is_told_by_what_it_calls(statement: str, idioms: tuple[str, ...]):
    text = f"for x, y in loader:\n    loss.backward()\n    {statement}  # here\n"
    assert of_marked(text) == idioms


def test_what_a_schedule_was_given_to_call_serves_it():
    text = "def rate(k):\n    return sum(shape(i) for i in range(k))  # here\n\nscheduler.step()\n{}\n"
    cases = {
        "scheduler.step()": (SCHEDULE,),
        "scheduler.step(rate(3))": (PYTHON_LOOP,),
        "print(rate(3))": (PYTHON_LOOP,),
    }
    for caller, idioms in cases.items():
        stack = [(FILE, 2, "rate"), (FILE, 5, "<module>")]
        assert Idioms(Places(Sources({FILE: text.format(caller)}))).of(stack) == idioms
    trains = [(FILE, 2, "rate"), (FILE, 2, "train_one_epoch"), (FILE, 5, "<module>")]
    text = text.format("scheduler.step()")
    assert Idioms(Places(Sources({FILE: text}))).of(trains) == (PYTHON_LOOP,)


def test_what_the_optimizer_calls_by_itself_is_a_hooks():
    text = "def note(*_):\n    seen.append(spectra(weights))  # here\n\n{}\n"
    for caller, found in {
        "optimizer.step()": (HOOK,),
        "self.inner.optimizer.step()": (HOOK,),
        "scaler.step(optimizer)": (),
        "train(optimizer)": (),
    }.items():
        stack = [(FILE, 2, "note"), (FILE, 4, "fit")]
        assert (
            Idioms(Places(Sources({FILE: text.format(caller)}))).of(stack, phase=Phase.OPTIMIZER) == found
        )
    text = text.format("optimizer.step()")
    own = [(FILE, 2, "orthogonal"), (FILE, 2, "Muon.step"), (FILE, 4, "fit")]
    assert Idioms(Places(Sources({FILE: text}))).of(own, phase=Phase.OPTIMIZER) == ()
    assert Idioms(Places(Sources({FILE: text}))).of([(FILE, 4, "fit")], phase=Phase.OPTIMIZER) == ()


def test_the_statement_of_a_call_over_several_lines_counts_for_each_of_them():
    assert of_marked("print(\n    'loss',\n    step,  # here\n)") == (LOG,)


def test_a_function_says_what_its_plain_lines_are_for():
    text = "def f(row):\n    text = '%d' % row  # here\n"
    assert of_marked(text, "log_metrics", "main") == (LOG,)
    assert of_marked(text, "Averager.update_ema", "train") == (EMA,)
    assert of_marked(text, "format", "report_step", "train") == (LOG,)


def test_the_loop_itself_does_not_give_its_name_to_what_it_calls():
    text = "def f(row):\n    text = '%d' % row  # here\n"
    assert of_marked(text, "train_and_log") == ()
    assert of_marked(text, "encode", "train_step", "log_everything") == ()


def test_a_line_that_only_calls_a_metrics_package_is_a_metric():
    assert of_marked("score(out)  # here", via="torchmetrics/metric.py:120 Metric.forward") == (METRIC,)
    assert of_marked("score(out)  # here", via="timm/models/vit.py:120 forward") == ()


@pytest.mark.parametrize(
    ("via", "idioms"),
    [
        ("matplotlib/pyplot.py:990 savefig", (LOG,)),
        ("torch/utils/tensorboard/writer.py:360 SummaryWriter.add_scalar", (LOG,)),
        ("wandb/sdk/wandb_run.py:1700 Run.log", (LOG,)),
        ("mlflow/utils/autologging_utils/safety.py:480 safe_patch_function", ()),
        ("comet_ml/monkey_patching.py:300 wrapper", ()),
    ],
)
def test_a_line_that_only_calls_a_package_that_draws_or_logs_is_logging(via: str, idioms: tuple[str, ...]):
    assert of_marked("keep(row)  # here", via=via) == idioms


def test_a_file_without_text_has_no_idioms():
    assert Idioms(Places(Sources())).of([("<stdin>", 3, "<module>")]) == ()


@pytest.mark.parametrize(
    ("head", "idioms"),
    [
        ("for frames, kinds in self.loader:", ()),
        ("while frames := drawn(rows):", ()),
        ("for i in range(0, len(rows), 32):", ()),
        ("for i in range(len(rows)):", (PYTHON_LOOP,)),
        ("for frames in rows:", (PYTHON_LOOP,)),
    ],
)
def test_who_hands_the_batches_of_a_loader_on_does_not_loop_over_values(head: str, idioms: tuple[str, ...]):
    text = (
        f"def endless():\n    while True:\n        {head}\n            yield frames.float().div(9)  # here"
    )
    assert of_marked(text, "endless", "main", phase=Phase.DATA_WAIT) == idioms
    inner = text.replace(
        "yield frames", "for frame in frames: keep(frame.float())  # here\n            yield frames"
    )
    inner = inner.replace("div(9)  # here", "div(9)")
    assert of_marked(inner, "endless", "main", phase=Phase.DATA_WAIT) == (PYTHON_LOOP,)


@pytest.mark.parametrize(
    ("head", "around", "idioms"),
    [
        ("for frames in self.loader:", "with stream:", ()),
        ("for frames in self.loader:", "if begun:", ()),
        ("while True:", "with stream:", ()),
        ("while True:", "if len(rows) > 9:", (PYTHON_LOOP,)),
        ("while True:", "while len(rows) > 9:", (PYTHON_LOOP,)),
    ],
)
def test_a_turn_that_may_yield_nothing_makes_no_batch_but_of_a_loader(head, around, idioms):
    text = f"""\
def prefetched(self):
    {head}
        scaled = frames.float().div(9)  # here
        {around}
            yield rows
        rows = scaled
"""
    assert of_marked(text, "prefetched", "main", phase=Phase.DATA_WAIT) == idioms
