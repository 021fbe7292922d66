"""Time the loop is blocked in `next(loader)`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakSet, ref

from diagnose.core.ledger import DATA_WAIT, EVALUATION, FIRST_GAP, GAP_AFTER, GAP_AFTER_EVALUATION
from diagnose.hooks._asked_freely import AskedFreely, nothing
from diagnose.hooks._batch import batch_size, is_on_device, tells_samples_first
from diagnose.hooks._collate import CollateClock
from diagnose.hooks._drawing import random_state
from diagnose.hooks._log import WIDTH
from diagnose.hooks._recorder import EVALUATED, TRAINED, UNUSED, Recorder
from diagnose.hooks.base import THEN, Hook, hidden, replaced, spanned, unseen

GAP = GAP_AFTER[DATA_WAIT]
TRAINING = DATA_WAIT + THEN

COLLATE_EVERY = 16
"""After the first batches, `collate_fn` is timed for one in this many."""


class DataLoaderHook(Hook):
    """Charges `next()` of every `DataLoader` iterator to `data_wait`, or to `evaluation` if that is what it
    is for.

    Patches `_BaseDataLoaderIter.__next__`, which the single- and multi-process iterators share; torch has
    no public hook there. The iterator's type, length and attributes stay what they are.

    A batch is for evaluation when gradients are off, unless those before it went straight to training; when
    the model was switched to evaluation mode; or when the iterator's batch before met gradient-free model
    calls only. An iterator that was begun for training goes on with it once the evaluation has had its
    model calls, whatever mode the model is in.

    A thread that takes batches ahead of the loop asks for them aside: that takes none of the loop's time,
    and is only counted.
    """

    requires = "torch.utils.data.dataloader"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch import is_grad_enabled
        from torch.compiler import is_dynamo_compiling
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        for_evaluation: WeakSet[Any] = WeakSet()
        latest: Any = nothing
        doubted: Any = nothing  # whose last batch was taken for evaluation as the ones before it were
        loaded = (0, 0)
        asked_ns = 0  # when the batch under way was asked for, where that is looked at
        starts: Any = None  # what is told how long the first one for an evaluation takes to come
        plain = False  # whether the size of the first tensor is all that this iterator's batches tell
        calls = 0
        clock, log = recorder.clock, recorder.log.append
        feed, on_batch = recorder.feed, recorder.looks.on_batch
        collating = CollateClock(recorder)
        freely = AskedFreely(recorder)

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            nonlocal asked_ns, latest, doubted, starts
            batches = args[0]
            if recorder.current == DATA_WAIT:
                return -1
            if doubted() is batches and recorder.batch_use == TRAINED:
                for_evaluation.discard(batches)
            doubted = nothing
            if latest() is batches:
                if recorder.batch_use == EVALUATED:
                    for_evaluation.add(batches)
                    recorder.samples -= loaded[0]
                    recorder.tokens -= loaded[1]
            else:
                latest = ref(batches)
                then = feed.undrawn.pop(batches, None)
                if then is not None and then != random_state():
                    recorder.facts["drawn_before_batch"] = True
            trained = recorder.evaluated and batches in feed.iterators
            free = not freely.trains(batches, is_grad_enabled())
            evaluating = free or (recorder.evaluating and not trained)
            if evaluating or (for_evaluation and batches in for_evaluation):
                latest = nothing
                recorder.evaluation_begins()
                if not evaluating:
                    doubted = ref(batches)
                    recorder.batch_use = UNUSED
                starts = feed.starting.pop(batches, None) if feed.starting else None
                asked_ns = clock() if starts is not None else 0
                return EVALUATION if starts is None else EVALUATION + THEN
            starts = None
            recorder.batch_asked()
            if recorder.curious:
                recorder.met.site("next")
            if recorder.curious or not calls % COLLATE_EVERY:
                collating.begin(batches)
            asked_ns = clock()
            return TRAINING

        def asked_aside(batches: Any) -> None:
            if recorder.thread and batches in feed.iterators:
                feed.counters["asked_aside"] += 1

        def after(args: tuple[Any, ...], batch: Any) -> None:
            nonlocal asked_ns, loaded, plain, starts
            if starts is not None:
                starts(clock() - asked_ns)
                starts, asked_ns = None, 0
                return
            collating.end(batch)
            index = feed.iterators.get(args[0]) if asked_ns and "waits" in recorder.facts else None
            if getattr(args[0], "_num_yielded", 0) == 1:  # an epoch begins, and maybe its workers
                index = None
            if index is not None:
                waits = recorder.facts["waits"][index]
                waits[0] += 1
                waits[1] += clock() - asked_ns
            asked_ns = 0
            asked = getattr(getattr(args[0], "_index_sampler", None), "batch_size", None) or 0
            loaded = batch_size(batch, asked)
            plain = tells_samples_first(batch, asked)
            if on_batch:
                for look in (*on_batch,):
                    recorder.guarded(look, batch)
            if recorder.curious and is_on_device(batch):
                recorder.facts["batches_on_device"] = True
            recorder.samples += loaded[0]
            recorder.tokens += loaded[1]
            if loaded[0]:
                recorder.calm = recorder.calm_when_told

        def wrap(original: Any) -> Any:
            asked = spanned(original, recorder, before, after)

            def call(batches: Any) -> Any:
                nonlocal calls, doubted, latest, loaded
                if is_dynamo_compiling():
                    return original(batches)
                interrupted = recorder.current
                calls += 1
                # The next batch of the loader that fed the last step, and nothing else has happened.
                if (
                    not plain
                    or interrupted < FIRST_GAP
                    or interrupted == GAP_AFTER_EVALUATION
                    or recorder.batch_use != TRAINED
                    or recorder.evaluating
                    or not calls % COLLATE_EVERY
                    or get_ident() != recorder.calm_when_told
                    or latest() is not batches
                    or not is_grad_enabled()
                ):
                    if get_ident() != recorder.thread:
                        recorder.guarded(asked_aside, batches)
                    try:
                        return asked(batches)
                    except BaseException as error:
                        doubted = nothing  # what is trained next is no batch of it
                        if latest() is batches:
                            collating.end()
                        if isinstance(error, StopIteration) and latest() is batches:
                            feed.epochs_ended += 1
                            recorder.batch_use = TRAINED
                            latest = nothing  # no batch is under way; persistent workers keep the iterator
                        unseen(error)
                        raise
                try:
                    recorder.batch_asked()
                except Exception:  # noqa: BLE001 (a hook meets the script)
                    recorder.broke(recorder.batch_asked)
                try:
                    recorder.current = DATA_WAIT
                    log(clock() * WIDTH + DATA_WAIT)
                    batch = original(batches)
                except BaseException as error:
                    recorder.leave(DATA_WAIT, interrupted)
                    if isinstance(error, StopIteration):
                        feed.epochs_ended += 1
                        recorder.batch_use = TRAINED
                        latest = nothing
                    unseen(error)
                    raise
                recorder.current = GAP
                log(clock() * WIDTH + GAP)
                try:
                    count = batch[0].size(0)
                    recorder.samples += count
                    loaded = (count, 0)
                    recorder.calm = recorder.calm_when_told
                except Exception:  # noqa: BLE001 (not such a batch as the ones before)
                    recorder.guarded(after, (batches,), batch)
                return batch

            recorder.log.kept_by(call)
            return hidden(functools.wraps(original)(call))

        with replaced(_BaseDataLoaderIter, "__next__", wrap):
            try:
                yield
            finally:
                collating.end()
