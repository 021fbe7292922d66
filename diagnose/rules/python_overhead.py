"""The loop's own Python code takes long"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import MAX_LINES, at, bounds, lost_of, named, seen_in, share_of
from diagnose.rules._machine import one_core
from diagnose.rules._own_code import PROFILER, TRAINS, own_lines, regular_lines
from diagnose.rules._phases import STEP
from diagnose.rules.base import Rule
from diagnose.rules.step_jitter import RARE_OWN, long_steps_ns

MIN_SHARE = 0.03
"""Some code stands between the calls of every loop; below this it is nobody's fault."""

LINE_SHARE = 0.01
"""A line of the loop that takes less of the step is not counted, nor a function that it calls: that much is
what a loop is made of."""

MOST_EDGE = 0.5
"""Of the time of a model: what the line that calls it takes besides is the edge of the call, unless it says
that it does more."""

TRAINER = "transformers/trainer.py:2520 Trainer._inner_training_loop"

ANY = (
    "Take the code out of the loop, do it every N steps, or replace Python loops by operations on whole"
    " tensors."
)
COPIED = (
    "Make the copy once, before the loop, and write into it: torch._foreach_copy_ copies all tensors, and"
    " torch._foreach_lerp_ averages them."
)

COMPUTES = (Phase.FORWARD, Phase.BACKWARD)

STEPS = at("optimizer.step()", 0.4, phase=Phase.OPTIMIZER)


class PythonOverhead(Rule):
    """
    ## What it means
    Between the model, the optimizer and the loader the loop runs code of its own: bookkeeping, loops over
    rows, work on lists and strings; so do hooks of the optimizer, and of modules that only note numbers.
    It takes part of each step, and the device has nothing to do meanwhile.

    ## What to do
    Take it out of the loop, do it every N steps, replace Python loops by tensor operations, or give it to
    another process.

    ## When it is wrong
    Code that computes something of the training itself in tensor operations, outside a module. What only a
    few steps do, at no regular interval, is `step-jitter`'s. Nothing is said where no model is called and
    no backward pass run: such a loop trains by its own code.
    """

    of_host = True
    fires_on = (
        profile(other_ms=12, where=(at("weights = [f(i) for i in order]", 0.1, "python-loop"),)),
        profile(other_ms=5, where=(at("book.update(batch)", 0.04),)),
        profile(other_ms=12, where=(replace(at("losses = slow(model, x)", 0.1), model_share=0.1),)),
        profile(other_ms=12, where=(at("watcher.step(batch)", 0.1),)),
        profile(optimizer_ms=30, where=(at("norms = spectra(p)", 0.1, "hook", phase=Phase.OPTIMIZER),)),
        profile(where=(at("seen.append(out.std().item())", 0.1, "hook", phase=Phase.FORWARD),)),
        profile(
            other_ms=12, where=tuple(replace(at(f"a{i} = b{i}", 0.008), function="book") for i in range(12))
        ),
        replace(RARE_OWN, host=HostStats()),  # `step-jitter` abstains
    )
    silent_on = (
        profile(other_ms=2.9),
        profile(other_ms=12, where=(at("print(step)", 0.1, "log"),)),
        profile(other_ms=90, optimizer_ms=10, where=(at("v = torch.bernoulli(p)", 0.8, "python-loop"),)),
        profile(other_ms=12, where=(at("p -= lr * p.grad", 0.1, "update"),)),
        profile(other_ms=4, where=(*(at(f"a{i} = b{i}", 0.004) for i in range(10)), STEPS)),
        profile(other_ms=12, where=(at("loss.backward()", 0.1),)),
        profile(other_ms=12, where=(replace(at("losses = ensemble(x)", 0.1), model_share=0.3),)),
        profile(other_ms=12, where=(at("self.optimizer.step()", 0.1),)),
        profile(optimizer_ms=30, where=(at("p.mul_(self.rate)", 0.1, phase=Phase.OPTIMIZER),)),
        profile(where=(at("h = self.encoder(x)", 0.1, phase=Phase.FORWARD),)),
        profile(other_ms=12, where=(at("state = env.step(a)", 0.1, "environment"),)),
        profile(other_ms=12, where=(at("torch._foreach_add_(params, grads)", 0.1, "update", "whole"),)),
        profile(other_ms=12, where=(at("fast = torch._foreach_sub(fast, slopes)", 0.1, "whole"),)),
        profile(other_ms=12, where=(replace(at("trainer.train()", 0.1), via=TRAINER),)),
        profile(other_ms=12, where=(replace(at("trainer.train()", 0.1), trains=True),)),
        profile(
            other_ms=12, where=(replace(at("record.step()", 0.1), via=f"{PROFILER}profiler.py:9 step"),)
        ),
        RARE_OWN,
    )

    def check(self, profile: Profile) -> Finding | None:
        if not any(profile.phase_time_ns.get(phase) for phase in COMPUTES):
            return None  # gradients that are made by hand: the loop's own code is the training
        long = Phase.OTHER in long_steps_ns(profile)  # what these take is `step-jitter`'s
        lines = counted(regular_lines(profile) if long else own_lines(profile), profile.where)
        share = share_of(lines)
        if share < MIN_SHARE:
            return None
        lost = lost_of(profile, lines)
        low, high = bounds(lost, lines)
        return Finding(
            rule=self.name,
            summary=f"Code of the loop itself takes {format_share(share)} of each step,"
            f" {format_ms(sum(lost.values()))}, most of it in {named(lines[0])}",
            lost_ns=lost,
            low_ns=low,
            high_ns=high,
            assumption="the code can be removed, or done elsewhere at no cost to the loop",
            evidence=(
                *(f"{seen_in(line)}, outside of every call that trains." for line in lines[:MAX_LINES]),
                *one_core(profile.host),
            ),
            fix=COPIED if "deepcopy(" in lines[0].text else ANY,
            file=lines[0].file,
            line=lines[0].line,
        )


def counted(own: Iterable[SourceLine], where: Iterable[SourceLine]) -> tuple[SourceLine, ...]:
    """Returns the lines that are more than every loop is made of: by themselves, or, in a function that
    trains nothing, together."""
    trains = {(line.file, line.function) for line in where if _trains(line)}
    # A transform of functions, say, has a way to go before and after the model that it calls.
    own = tuple(line for line in own if line.idiom or line.via or line.share > MOST_EDGE * line.model_share)
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in own:
        shares[line.file, line.function] += line.share
    return tuple(
        line
        for line in own
        if line.share >= LINE_SHARE
        or (shares[line.file, line.function] >= LINE_SHARE and (line.file, line.function) not in trains)
    )


def _trains(line: SourceLine) -> bool:
    computes = line.phase in STEP and "hook" not in line.idiom
    return computes or line.trains or bool(TRAINS.search(line.text))
