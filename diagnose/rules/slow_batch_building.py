"""The loop makes or finishes its own batches, and takes long over it"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from diagnose.core.finding import Finding
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Loader, Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import MIN_SAMPLES, at, bounds, holding_up_batches, named, part_of
from diagnose.rules._own_batches import between_epochs, least_wait_ns, making, own_part, takes_batch
from diagnose.rules._own_code import irregular_batches
from diagnose.rules._supply import HANDOVER_NS, MIN_HANDOVERS, supply_of
from diagnose.rules._worker_examples import fed_by
from diagnose.rules.base import Rule
from diagnose.rules.slow_rollout import is_rollout, rollout_share
from diagnose.rules.step_jitter import RARE_BATCH, long_steps_ns
from diagnose.source.function_names import OUTERMOST_WORDS
from diagnose.source.names import words

MIN_SHARE = 0.05
"""Of the step. Slicing tensors, as a loop without a loader does, takes less."""

MUCH_SHARE = 0.15
"""From here on it is much, whatever the lines do."""

MOST_SHARE = 0.5
"""Of the step. A model takes longer to learn from a batch than it takes to draw one anew, noise and all."""

PYTHON_PART = 0.5
"""Python code, not tensor operations, makes the batch where its lines take this part of the time."""

PYTHON = {"python-loop", "log", "wait", "sync"}
"""Idioms of lines that loop in Python, read files, wait, or read tensors value by value."""

NO_PART = 0.02
"""A line with less of the time for batches is left out of the evidence."""

LEAST = 0.8
"""What slicing a finished tensor takes remains."""

MAX_LINES = 3

FROM_EXPERIENCE = (
    "Keep the experience in tensors that are made once and written to by index, and take each batch of them"
    " by indexing."
)
MAKES, FINISHES = "makes its own batches", "does work on the batches that the DataLoader delivers"
DRAWS = "draws what is in each batch before its workers can make it"
DRAWS_ALONE = "draws what is in each batch before it is fetched"
ITERATES = {"__iter__", "__next__"}

ENCODED = at("ids = [code[c] for c in text]", 0.19, "python-loop", phase=Phase.DATA_WAIT)
TOKENIZED = at("enc = tokenizer(batch['text'])", 0.36, phase=Phase.DATA_WAIT)
DUSTED = replace(at("images = dust(images)", 0.18, "python-loop", phase=Phase.DATA_WAIT), between=0.18)
SERIAL = Program(loaders=(Loader(num_workers=0),))
BEGUN_SHORTLY = profile(
    data_wait_ms=11,
    forward_ms=88,
    program=SERIAL,
    input=InputStats(
        epoch_starts=9,
        epoch_start_ns=0.0,
        epoch_start_gap_ns=6.5e6,
        steady_gap_ns=10.5e6,
        steady_wait_ns=1e6,
    ),
    where=(replace(DUSTED, share=0.1, between=0.1),),
)
"""Targets of the loss are made as each epoch begins, in less than these lines take in all steps."""
FED = at("for batch in loader:", 0.38, phase=Phase.DATA_WAIT)
DRAWN = replace(
    at("rows += rng.choice(pool, 4).tolist()", 0.19, phase=Phase.DATA_WAIT), function="Pairs.__iter__"
)
DRAWN_ALONE = InputStats(steady_wait_ns=22e6, own_drawing_ns=20e6)
HANDED = replace(at("return self.table[row]", 0.02, phase=Phase.DATA_WAIT), function="Rows.__getitem__")
DECODED = replace(at("return decoded(path)", 0.5, phase=Phase.DATA_WAIT), function="decode")
SAMPLED = replace(
    at("rows = frame.sample(64)", 0.28, phase=Phase.DATA_WAIT), via="pandas/core/generic.py:61 sample"
)


def in_gaps(begins_ms: float, steady_ms: float, **stats: float) -> InputStats:
    """What passes between hooked calls, beyond the others in the steps that begin epochs, and in others."""
    gaps = {"epoch_start_gap_ns": begins_ms * 1e6, "steady_gap_ns": steady_ms * 1e6}
    return InputStats(epoch_starts=9, epoch_start_ns=0.0, **gaps, **stats)  # type: ignore[arg-type]


class SlowBatchBuilding(Rule):
    """
    ## What it means
    The loop, or a function like `get_batch`, makes each batch itself, on the training thread, and the model
    waits for it. Usually it encodes text, or builds lists, in Python. Or a `DataLoader` delivers
    batches, and the loop does the rest of the work on them: it tokenizes, augments, converts, itself or by
    modules without parameters.

    ## What to do
    Do once, before the loop, what is the same in each epoch (encode the whole text into one tensor), and
    slice that. Or move the code into a `Dataset` or a `collate_fn`, and let the workers of a `DataLoader`
    run it. A sampler always runs on the training thread, whatever workers there are: let it draw many
    batches at once, in arrays.

    ## When it is wrong
    Data that depends on what the model has just done. The steps of a game are known for what they are, and
    `slow-rollout`'s, where the code says so: `obs, reward, done, info = env.step(action)`.
    A batch that is drawn anew each time by a few tensor operations, such as noise for a generator: where it
    takes no longer than to take one over from a worker (2 ms) and the model takes longer, it is not named.
    Nor are modules that prepare batches on a device, or within `torch.no_grad()`.
    """

    explains = ("python-overhead",)
    fires_on = (
        profile(data_wait_ms=20, where=(ENCODED,)),
        profile(data_wait_ms=30, where=(at("x = make(step)", 0.29, phase=Phase.DATA_WAIT),)),
        profile(  # reads a shard each 50 steps, which takes as long as to make the batches of these
            data_wait_ms=40,
            input=in_gaps(20.5, 20),
            where=tuple(
                at(text, 0.2, phase=Phase.DATA_WAIT) for text in ("x = make(step)", "rows = load(shard)")
            ),
        ),
        fed_by(data_wait_ms=40, stats={"steady_wait_ns": 2e6, "epoch_start_ns": 0.0}, where=(TOKENIZED,)),
        fed_by(
            data_wait_ms=22,
            fetch_ms=30,
            workers={"ready_batches": 3.5},
            stats={"drawing_ns": 20e6, "epoch_start_ns": 0.0},
            where=(FED, DRAWN),
        ),
        profile(data_wait_ms=20, program=SERIAL, input=InputStats(steady_wait_ns=2e6), where=(DUSTED,)),
        profile(  # something else than the batches begins the epochs, such as targets of the loss
            data_wait_ms=20,
            program=SERIAL,
            input=in_gaps(40, 19.5, steady_wait_ns=1e6),
            where=(replace(DUSTED, share=0.19, between=0.19),),
        ),
        BEGUN_SHORTLY,
        profile(data_wait_ms=22, program=SERIAL, input=DRAWN_ALONE, where=(DRAWN, HANDED)),
        profile(step_ms=4, data_wait_ms=1.2, where=(replace(ENCODED, share=0.28, num_samples=280),)),
        profile(step_ms=4, data_wait_ms=1.2, where=(SAMPLED,)),
        profile(step_ms=3, data_wait_ms=1.8, where=(at("x = whiten(x)", 0.58, phase=Phase.DATA_WAIT),)),
    )
    silent_on = (
        RARE_BATCH,
        profile(
            data_wait_ms=20,
            forward_ms=79,
            program=SERIAL,
            input=in_gaps(18, 12, steady_wait_ns=1e6),
            where=(replace(DUSTED, share=0.19, between=0.19),),
        ),
        profile(
            data_wait_ms=20,
            input=in_gaps(18, 9),
            where=(at("mixed = overlay(images)", 0.19, phase=Phase.DATA_WAIT),),
        ),
        profile(
            step_ms=4,
            data_wait_ms=1.2,
            where=(at("xt = a[t] * x0 + b[t] * torch.randn_like(x0)", 0.28, phase=Phase.DATA_WAIT),),
        ),
        profile(data_wait_ms=10, where=(at("x = data[i : i + 32]", 0.1, phase=Phase.DATA_WAIT),)),
        profile(data_wait_ms=4, where=(replace(ENCODED, share=0.04, num_samples=40),)),
        profile(data_wait_ms=20, program=SERIAL, where=(ENCODED,)),
        profile(data_wait_ms=20),
        profile(data_wait_ms=20, program=SERIAL, input=InputStats(steady_wait_ns=19e6), where=(DUSTED,)),
        profile(data_wait_ms=22, program=SERIAL, input=DRAWN_ALONE, where=(HANDED,)),
        profile(data_wait_ms=72, program=SERIAL, input=DRAWN_ALONE, where=(DECODED,)),
        profile(
            data_wait_ms=22,
            program=SERIAL,
            input=replace(DRAWN_ALONE, own_drawing_ns=4e6),
            where=(DRAWN, HANDED),
        ),
        fed_by(data_wait_ms=40, stats={"epoch_start_ns": 0.0}, where=(FED, TOKENIZED)),
        fed_by(data_wait_ms=40, stats={"steady_wait_ns": 2e6, "epoch_start_ns": 0.0}, where=(FED,)),
        profile(
            data_wait_ms=52,
            where=(
                at("obs, reward, done = env.step(a)", 0.5, "environment", phase=Phase.DATA_WAIT),
                at("x = torch.tensor(obs)", 0.02, phase=Phase.DATA_WAIT),
            ),
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        made = _made(profile)
        if not _is_much(made, profile):
            return None
        lines, wait_ns = made.lines, made.wait_ns
        share = wait_ns / profile.step_time_ns
        shown = [line for line in lines if line.share >= NO_PART * made.seen][:MAX_LINES]
        lost = {Phase.DATA_WAIT: wait_ns}
        low_ns, high_ns = bounds(lost, lines)
        alone = made.draws and not made.has_workers
        does = DRAWS_ALONE if alone else DRAWS if made.draws else FINISHES if made.is_fed else MAKES
        by_workers = made.is_fed and made.has_workers
        return Finding(
            rule=self.name,
            summary=f"The loop {does}, which takes {format_share(share)} of each step,"
            f" {format_ms(wait_ns)}, most of it in {named(lines[0])}",
            lost_ns=lost,
            low_ns=min(LEAST * low_ns, wait_ns if alone else _spare_ns(profile, wait_ns)),
            high_ns=high_ns,
            assumption="batches are made beforehand, or by workers while the model computes"
            + ("; the lower bound shares the workers and CPUs there are" if by_workers else ""),
            evidence=(
                *(() if made.is_fed else ("No DataLoader feeds the loop.",)),
                *(
                    f"{format_share(line.share)} of the time in {named(line)}, {line.function}, before the"
                    f" model has its batch, about {line.num_samples} samples."
                    for line in shown
                ),
            ),
            fix=_fix(made, profile),
            file=lines[0].file,
            line=lines[0].line,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What the training thread does for its batches.

    Attributes:
        wait_ns: What it takes of each step.
        lines: Where, those that take longest first.
        is_fed: Whether loaders deliver the batches.
        has_workers: Whether each loader has workers, if there are any loaders.
        draws: Whether most of it is to draw which samples a batch has.
    """

    wait_ns: float
    lines: list[SourceLine]
    is_fed: bool
    has_workers: bool
    draws: bool

    @property
    def seen(self) -> float:
        """The share of the step in which the lines were seen."""
        return sum(line.share for line in self.lines)


def _made(profile: Profile) -> _Made:
    loaders = profile.program.loaders
    is_fed, has_workers = bool(loaders), all(loader.num_workers for loader in loaders)
    lines = [line for line in making(profile) if not (is_fed and takes_batch(line))]
    if not has_workers:  # the dataset's lines run on the training thread too
        lines = sorted((own_part(line) for line in lines if line.between), key=lambda line: -line.share)
    wait_ns = least_wait_ns(profile) - rollout_share(profile, Phase.DATA_WAIT) * profile.step_time_ns
    wait_ns -= sum(line.share for line in holding_up_batches(profile)) * profile.step_time_ns
    wait_ns -= between_epochs(profile)[0]
    if Phase.DATA_WAIT in long_steps_ns(profile):  # what these take is `step-jitter`'s
        rare = {(line.file, line.line): line.share for line in irregular_batches(profile)}
        wait_ns -= sum(rare.values()) * profile.step_time_ns
        rest = [(line, line.share - rare.get((line.file, line.line), 0.0)) for line in lines]
        lines = [part_of(line, share) for line, share in rest if share > 0]
    if is_fed:
        wait_ns -= _fed_ns(profile)
        wait_ns = min(wait_ns, sum(line.share for line in lines) * profile.step_time_ns)
    drawing_ns = _drawing_ns(profile)
    draws = drawing_ns > wait_ns
    if draws and not has_workers:  # then the loader runs the sampler's lines, too
        lines = _drawing(profile)
    return _Made(
        wait_ns=max(wait_ns, drawing_ns), lines=lines, is_fed=is_fed, has_workers=has_workers, draws=draws
    )


def _is_much(made: _Made, profile: Profile) -> bool:
    """Whether it takes long enough, and longer than it would take to take batches over from workers."""
    share, lines, seen = made.wait_ns / profile.step_time_ns, made.lines, made.seen
    if share < MIN_SHARE or sum(line.num_samples for line in lines) < MIN_SAMPLES or not seen:
        return False
    in_python = sum(line.share for line in lines if PYTHON & set(line.idiom)) / seen
    in_packages = sum(line.share for line in lines if line.via or PYTHON & set(line.idiom)) / seen
    # Tensor operations alone: fresh noise, an index. A worker's batch takes as long to be handed over.
    by_torch = not made.is_fed and in_packages < PYTHON_PART and share < MOST_SHARE
    if (by_torch or not made.has_workers) and made.wait_ns < MIN_HANDOVERS * HANDOVER_NS:
        return False
    return share >= MUCH_SHARE or in_python >= PYTHON_PART


def _fix(made: _Made, profile: Profile) -> str:
    if any(map(is_rollout, profile.where)):
        return FROM_EXPERIENCE
    if made.draws:
        return "Let the sampler draw the batches of an epoch at once, in arrays, or before the loop."
    if made.is_fed and made.has_workers:
        return "Do that in the Dataset or its collate_fn, so that the workers of the DataLoader do it."
    if made.is_fed:
        return "Do that in the Dataset or its collate_fn, and give the DataLoader workers to do it."
    maker = "this line" if _is_loops(made.lines[0], profile) else made.lines[0].function
    return (
        f"Do what {maker} does once before the loop, or in a Dataset that the workers of a DataLoader read."
    )


def _drawing_ns(profile: Profile) -> float:
    """Returns what drawing the samples of a batch takes of each step, whoever fetches them."""
    loaders, stats = profile.program.loaders, profile.input
    if not loaders:
        return 0.0
    has_workers = all(loader.num_workers for loader in loaders)
    return (stats.drawing_ns if has_workers else stats.own_drawing_ns) or 0.0


def _drawing(profile: Profile) -> list[SourceLine]:
    """Returns the lines of what a loader without workers draws from: its sampler, or what else is iterated
    over and not its dataset. What they call may be what its samples are made with, too."""
    loaders = profile.program.loaders
    others = {name for loader in loaders for name in (loader.dataset, loader.collate)}
    others |= {"__getitem__", "__getitems__"}
    lines = [
        (line, line.function.split("."))
        for line in making(profile)
        if not line.between and not takes_batch(line)
    ]
    lines = [(line, names) for line, names in lines if others.isdisjoint(names)]
    draws = {loader.sampler for loader in loaders if loader.sampler} | ITERATES
    draws |= {of for _, names in lines for of, name in pairwise(names) if name in ITERATES}
    return [line for line, names in lines if draws & set(names)]


def _is_loops(line: SourceLine, profile: Profile) -> bool:
    """Whether a line's function holds the loop, by its name or by what else was seen in it."""
    inside = (each for each in profile.where if (each.file, each.function) == (line.file, line.function))
    return bool(words(line.function.rpartition(".")[2]) & OUTERMOST_WORDS) or any(
        each.phase in (Phase.BACKWARD, Phase.OPTIMIZER) for each in inside
    )


def _fed_ns(profile: Profile) -> float:
    """Returns what a step waits for loaders; all of it where that is not known."""
    steady_ns = profile.input.steady_wait_ns
    return profile.step_time_ns if steady_ns is None else steady_ns + (profile.input.epoch_start_ns or 0.0)


def _spare_ns(profile: Profile, made_ns: float) -> float:
    """Returns how much shorter a step can be when the workers there are make what takes `made_ns`."""
    supply = supply_of(profile)
    if supply is None and all(loader.num_workers for loader in profile.program.loaders):
        return made_ns
    if supply is None:
        busy_ns = (profile.host.process_cpus or 0.0) * profile.step_time_ns / (profile.own_cpus or math.inf)
        return max(0.0, min(made_ns, profile.step_time_ns - busy_ns) - HANDOVER_NS)
    paces = [(supply.busy_ns + made_ns) / supply.loader.num_workers]
    if supply.cpus:
        paces.append((made_ns + supply.own_cpu_ns + supply.worker_cpu_ns) / supply.cpus)
    return max(0.0, profile.step_time_ns - max(paces))
