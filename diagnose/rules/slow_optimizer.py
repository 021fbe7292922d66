"""The optimizer updates its tensors one by one"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Model, Optimizer, Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import (
    MAX_LINES,
    MIN_SAMPLES,
    at,
    bounds,
    lost_of,
    seen_in,
    share_of,
    under_trainer,
    updating,
)
from diagnose.rules._update_times import (
    MIN_ELEMENTS,
    saved_at_least,
    saved_by_one_group,
    saved_part,
    takes_ns,
)
from diagnose.rules.base import WORTH_SHARE, Rule
from diagnose.source.calls import with_arguments

MIN_TENSORS = 20
"""With fewer tensors there are few calls to save."""

MIN_GROUPS = 20
"""With fewer groups of parameters there are few calls to save."""

MAX_PER_GROUP = 4
"""Tensors in a group on average, up to which it is the groups that take long. A layer has more: the rates
of layers differ for a reason."""

MAX_OWN_ELEMENTS = 8_192
"""Mean size of tensors up to which an optimizer that the script has written is said to be slow. Of eight
velocities over 74 tensors `foreach` saves 0.75 at 256 elements, 0.5 at 1,600, 0.17 at 4,900; at 16,384 it
saves nothing for certain, and at 65,536 it takes longer, as each call goes through the memory anew
(`benchmarks/optimizer_step.py`)."""

MIN_OWN_SHARE = 0.03

SAVED_OF_OWN = (0.1, 0.4, 0.9)
"""Of the lines that go over the tensors in Python: what calls for all tensors save, and a compiled step."""

MIN_OPERATIONS = 5
"""So many operations on each tensor, as an Adam or a Lion has and SGD with momentum has not, go through the
memory at least twice as often as one kernel of them all does, whatever the size of the tensors."""

SAVED_OF_PASSES = (0.1, 0.5, 0.85)
"""Of such lines: less than `SAVED_AT_ANY_SIZE`, as it takes a compiler, or a class of torch's."""

LOW, HIGH = 0.6, 1.15
"""The measured savings scatter by this much with the size of the tensors and the number of cores."""

OVER_TENSORS = {"python-loop", "update"}
"""Idioms of lines that do the same to one tensor after the other."""

IN_ONE_CALL = (
    "Update all tensors in one call, torch._foreach_add_(params, grads, alpha=-lr), or leave it to"
    " torch.optim.SGD(..., fused=True)."
)
COMPILED = (
    "Update all tensors in one call, as torch._foreach_mul_ and torch._foreach_add_ do, or let"
    " torch.compile make a kernel of the loop."
)

MANY_OPTIMIZERS = 4
"""So many made by one line are one optimizer for each tensor."""

BESIDE = re.compile(
    r"clip_grad|clip_.*norm|zero_grad|unscale_|sched\w*\.step\(|lr_scheduler", re.IGNORECASE
)
"""What else is done in the optimizer's phase, by the script's line or the package's function in it."""


def one(
    kind: str = "AdamW",
    num_tensors: int = 400,
    num_elements: int = 400_000,
    implementation: str = "for-loop",
    can_fuse: bool = True,
    can_group: bool = True,
    num_groups: int = 1,
) -> Program:
    optimizer = Optimizer(
        kind=kind,
        num_tensors=num_tensors,
        num_elements=num_elements,
        implementation=implementation,
        can_fuse=can_fuse,
        can_group=can_group,
        num_groups=num_groups,
    )
    return Program(optimizers=(optimizer,))


OWN = one(kind="Mine", implementation="", can_fuse=False)
LARGE_OWN = one(kind="Mine", num_elements=80_000_000, implementation="", can_fuse=False)
OWN_LINE = at("velocity.mul_(beta).add_(p.grad)", 0.2, "python-loop", phase=Phase.OPTIMIZER)
LION = (
    replace(OWN_LINE, text="u = m.mul(b).add(p.grad, alpha=1 - b)", num_operations=2),
    replace(OWN_LINE, text="p.mul_(d).add_(u.sign_(), alpha=-lr)", num_operations=3),
)
ONE_EACH = Program(optimizers=one(num_tensors=1, num_elements=1_000).optimizers * 60)
ON_CUDA = (Model(kind="Net", device="cuda"),)
UPDATING = at("p -= lr * p.grad", 0.1, "update")


class SlowOptimizer(Rule):
    """
    ## What it means
    The optimizer calls torch several times for every parameter tensor. With hundreds of small tensors these
    calls, not the arithmetic, take the time; with a few large ones each of Adam's calls goes through all of
    the memory anew. On a CPU this is torch's default; on a GPU someone asked for it. And each group of
    parameters takes calls of its own, however its tensors are updated.

    ## What to do
    Give the optimizer `fused=True`: one call updates all tensors. Where torch has no fused
    implementation, `foreach=True`. Put tensors with the same settings into one group. An optimizer of the
    script's own that goes over small tensors in Python can call `torch._foreach_mul_` and the like, or have
    its step compiled; over large ones, where it has many operations on each, only the latter helps. So can
    a loop over the weights beside an optimizer. Nothing is said of what neither can take: sparse
    gradients, 16-bit parameters of SGD on a CPU.

    ## When it is wrong
    The results of both differ in the last bit. Code that reads or changes the optimizer's state between
    tensors may not expect them.
    """

    needs = ("program.optimizers",)
    actions = ("fused-optimizer",)
    fires_on = (
        profile(optimizer_ms=30, program=one()),
        profile(optimizer_ms=8, program=one(kind="SGD")),
        profile(optimizer_ms=30, program=one(num_tensors=4, num_elements=8_000_000)),
        profile(optimizer_ms=30, program=OWN, where=(OWN_LINE,)),
        profile(optimizer_ms=30, program=LARGE_OWN, where=LION),
        profile(other_ms=12, program=one(implementation="fused"), where=(UPDATING,)),
        profile(other_ms=12, where=(UPDATING,)),
        profile(optimizer_ms=30, program=ONE_EACH),
        profile(optimizer_ms=30, program=one(num_groups=400, implementation="fused")),
        profile(optimizer_ms=30, program=one(num_groups=400)),
    )
    silent_on = (
        profile(optimizer_ms=30, program=one(implementation="fused")),
        profile(optimizer_ms=30, program=one(implementation="fused", num_groups=40)),
        profile(optimizer_ms=2, program=one()),
        profile(
            optimizer_ms=30,
            program=one(),
            where=(
                at("clip_grad_norm_(model.parameters(), 1.0)", 0.29, "clip", phase=Phase.OPTIMIZER),
                at("optimizer.step()", 0.01, phase=Phase.OPTIMIZER),
            ),
        ),
        profile(optimizer_ms=30, program=one(num_tensors=4, num_elements=4_000)),
        profile(optimizer_ms=30, program=one(kind="SGD", num_tensors=4, num_elements=8_000_000)),
        profile(
            optimizer_ms=30,
            device="cuda",
            program=replace(one(num_tensors=4, num_elements=8_000_000), models=ON_CUDA),
        ),
        profile(optimizer_ms=30, program=OWN),
        profile(optimizer_ms=30, program=LARGE_OWN, where=(replace(OWN_LINE, num_operations=2),)),
        profile(other_ms=12, program=one(implementation="fused"), where=(at("x", 0.1, "python-loop"),)),
        profile(
            optimizer_ms=30,
            program=Program(optimizers=one("SGD", num_tensors=1, num_elements=100).optimizers * 4),
        ),
        profile(optimizer_ms=30, program=one(kind="SGD", can_fuse=False)),
        profile(
            optimizer_ms=30,
            device="cuda",
            program=replace(one(kind="MyAdam", can_fuse=False, can_group=False), models=ON_CUDA),
        ),
    )

    def applies(self, profile: Profile) -> bool:
        program = profile.program
        return bool(_in_groups(program) or _slow(program) or _own(program) or updating(profile))

    def check(self, profile: Profile) -> Finding | None:
        # Both may be of the same tensors: what saves more is told.
        of_torch = [
            each for each in (self._of_groups(profile), self._of_torch(profile)) if each is not None
        ]
        most = max(of_torch, key=lambda finding: finding.lost_ns_per_step, default=None)
        found = [each for each in (most, self._of_own(profile)) if each is not None]
        return _together(*found) if len(found) > 1 else next(iter(found), None)

    def _of_groups(self, profile: Profile) -> Finding | None:
        """Of torch's optimizers whose tensors are in groups of few."""
        grouped = _in_groups(profile.program)
        if not grouped:
            return None
        worst = max((_of_kind(each, grouped) for each in grouped), key=lambda each: each.num_groups)
        saves = saved_by_one_group(worst)
        part = _part_of(grouped, profile.program)
        time_ns = stepping_share(profile) * profile.spent_ns(Phase.OPTIMIZER)
        lost_ns = saves * part * time_ns
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        fuses = worst.can_fuse and worst.implementation != "fused"
        return Finding(
            rule=self.name,
            summary=f"{worst.kind} updates {worst.num_tensors} tensors in {worst.num_groups} groups, one by"
            " one.",
            lost_ns={Phase.OPTIMIZER: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, part * time_ns),
            assumption=f"one group{' with fused=True' if fuses else ''} saves {format_share(saves)} of what"
            " step() takes, as measured on CPUs",
            evidence=(
                f"{format_ms(time_ns)} of each step pass in the optimizer's step(),"
                f" {format_share(time_ns / profile.step_time_ns)} of it.",
                f"Each of {worst.num_groups} groups is updated by calls of its own.",
            ),
            fix="Put tensors with the same settings into one group. Where each has a rate of its own, a few"
            " rates for all of them may do.",
            code=with_arguments(worst.call, f"torch.optim.{worst.kind}", fused=True) if fuses else "",
            file=worst.file,
            line=worst.line,
        )

    def _of_torch(self, profile: Profile) -> Finding | None:
        """Of torch's optimizers."""
        slow, on_gpu = _slow(profile.program), _on_gpu(profile.program)
        if not slow:
            return None
        worst = max((_of_kind(each, slow) for each in slow), key=lambda optimizer: optimizer.num_tensors)
        if not worst.can_fuse and not (worst.can_group and on_gpu):
            return None  # on a CPU `foreach` saves little
        saves = saved_part(worst, on_gpu)
        part = _part_of(slow, profile.program)
        time_ns = stepping_share(profile) * profile.spent_ns(Phase.OPTIMIZER)
        lost_ns = saves * part * time_ns
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        option = "fused" if worst.can_fuse else "foreach"
        places = [(each.file, each.line) for each in slow if each.file]
        own = (worst.file, worst.line)
        others = [
            f"{Path(file).name}:{line}" for file, line in dict.fromkeys(places) if (file, line) != own
        ]
        fix = f"Give {worst.kind} {option}=True"
        if places.count(own) >= MANY_OPTIMIZERS:
            fix = f"Make one {worst.kind} of all these tensors, with {option}=True"
        return Finding(
            rule=self.name,
            summary=f"{worst.kind} updates {worst.num_tensors} tensors one by one.",
            lost_ns={Phase.OPTIMIZER: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, part * time_ns),
            assumption=f"{option}=True saves {format_share(saves)} of what step() takes, as measured on"
            " CPUs",
            evidence=(
                f"{format_ms(time_ns)} of each step pass in the optimizer's step(),"
                f" {format_share(time_ns / profile.step_time_ns)} of it.",
                f"{worst.kind} has {worst.num_tensors} tensors of"
                f" {worst.num_elements / worst.num_tensors:,.0f} elements on average and runs as a loop"
                " over them.",
            ),
            fix=fix + (f", and likewise what is made at {' and '.join(others)}." if others else "."),
            code='TrainingArguments(..., optim="adamw_torch_fused")'
            if not worst.call and under_trainer(profile) and (worst.kind, option) == ("AdamW", "fused")
            else with_arguments(worst.call, f"torch.optim.{worst.kind}", **{option: True}),
            file=worst.file,
            line=worst.line,
            actions=self.actions if worst.can_fuse else (),
        )

    def _of_own(self, profile: Profile) -> Finding | None:
        """Of an optimizer, or a loop over the weights, that the script has written itself."""
        stepping, saved = _stepping(profile)
        lines = tuple(sorted((*stepping, *updating(profile)), key=lambda line: -line.share))
        share = share_of(lines)
        if share < MIN_OWN_SHARE:
            return None
        summary = "The loop updates the weights one by one, in Python."
        if stepping:
            worst = max(_own(profile.program), key=lambda optimizer: optimizer.num_tensors)
            summary = f"{worst.kind} updates {worst.num_tensors} tensors one by one, in Python."
        low, expected, high = saved
        lost = lost_of(profile, lines)
        least, most = bounds(lost, lines)
        return Finding(
            rule=self.name,
            summary=summary,
            lost_ns={phase: expected * ns for phase, ns in lost.items()},
            low_ns=low * least,
            high_ns=high * most,
            assumption="its step is compiled, or calls torch once for all tensors",
            evidence=tuple(f"{seen_in(line)}." for line in lines[:MAX_LINES]),
            fix=COMPILED if stepping else IN_ONE_CALL,
            code="step = torch.compile(optimizer.step)" if stepping else "",
            file=lines[0].file,
            line=lines[0].line,
        )


def stepping_share(profile: Profile) -> float:
    """Returns the part of the optimizer's phase in which it steps: not clips, nor zeroes gradients."""
    lines = [line for line in profile.where if line.phase is Phase.OPTIMIZER and not line.in_worker]
    total = sum(line.share for line in lines)
    if sum(line.num_samples for line in lines) < MIN_SAMPLES or not total:
        return 1.0
    beside = sum(line.share for line in lines if BESIDE.search(line.text) or BESIDE.search(line.via))
    return 1 - beside / total


def _own(program: Program) -> list[Optimizer]:
    """Returns the optimizers of the script's own whose many tensors are small, or have many elements."""
    own = [optimizer for optimizer in program.optimizers if not optimizer.implementation]
    all_own = [_of_kind(optimizer, own) for optimizer in own]
    return [each for each in all_own if _is_small(each) or each.num_elements >= MIN_ELEMENTS]


def _is_small(optimizer: Optimizer) -> bool:
    """Whether it has many tensors, which are small."""
    mean = MAX_OWN_ELEMENTS * optimizer.num_tensors
    return optimizer.num_tensors >= MIN_TENSORS and optimizer.num_elements <= mean


def _stepping(profile: Profile) -> tuple[list[SourceLine], tuple[float, float, float]]:
    """Returns the lines in which an optimizer of the script's own goes over tensors, and what can be saved
    of them; no lines where that is too little."""
    own = _own(profile.program)
    lines = [
        line
        for line in profile.where
        if line.phase is Phase.OPTIMIZER and not line.in_worker and OVER_TENSORS & set(line.idiom)
        if not {"hook", "whole"} & set(line.idiom)
    ]
    if any(map(_is_small, own)):
        return lines, SAVED_OF_OWN
    if own and sum(line.num_operations for line in lines) >= MIN_OPERATIONS:
        return [line for line in lines if line.num_operations], SAVED_OF_PASSES
    return [], SAVED_OF_OWN


def _in_groups(program: Program) -> list[Optimizer]:
    """Returns torch's optimizers that would be faster with their tensors in one group, on a CPU."""
    if _on_gpu(program):
        return []
    known = [each for each in program.optimizers if each.implementation and each.num_groups > 1]
    kinds = [_of_kind(each, known) for each in known]
    return [
        each
        for each, kind in zip(known, kinds, strict=True)
        if kind.num_groups >= MIN_GROUPS and kind.num_tensors <= MAX_PER_GROUP * kind.num_groups
        if kind.can_fuse or kind.implementation != "for-loop"
    ]


def _of_kind(optimizer: Optimizer, among: list[Optimizer]) -> Optimizer:
    """Returns an optimizer with the tensors of all that are like it: some have one for each tensor."""

    def kind(one: Optimizer) -> tuple[str, str, bool, bool]:
        return one.kind, one.implementation, one.can_fuse, one.can_group

    alike = [each for each in among if kind(each) == kind(optimizer)]
    return replace(
        optimizer,
        num_tensors=sum(each.num_tensors for each in alike),
        num_elements=sum(each.num_elements for each in alike),
        num_groups=sum(each.num_groups for each in alike),
    )


def _together(*findings: Finding) -> Finding:
    """Returns one finding of what was found of torch's optimizers and of the script's own code."""
    first, second = sorted(findings, key=lambda finding: -finding.lost_ns_per_step)
    phases = {**first.lost_ns, **second.lost_ns}
    return replace(
        first,
        summary=f"{first.summary} {second.summary}",
        lost_ns={phase: first.lost_ns.get(phase, 0.0) + second.lost_ns.get(phase, 0.0) for phase in phases},
        low_ns=first.low_ns + second.low_ns,
        high_ns=first.high_ns + second.high_ns,
        assumption=f"{first.assumption}; {second.assumption}",
        evidence=(*first.evidence, *second.evidence),
        fix=f"{first.fix} {second.fix}",
        actions=first.actions or second.actions,
    )


def _on_gpu(program: Program) -> bool:
    return any(model.device != "cpu" for model in program.models)


def _slow(program: Program) -> list[Optimizer]:
    """Returns the optimizers that would be faster with one call for all tensors."""
    on_gpu = _on_gpu(program)
    loops = [optimizer for optimizer in program.optimizers if optimizer.implementation == "for-loop"]
    return [
        optimizer
        for optimizer in loops
        if (kind := _of_kind(optimizer, loops)).num_tensors >= MIN_TENSORS or saved_at_least(kind, on_gpu)
    ]


def _part_of(slow: list[Optimizer], program: Program) -> float:
    """Returns the part of the steps of all optimizers that some of them take: on a CPU by what their
    tensors cost one by one or fused, elsewhere by how many these are."""
    on_gpu = _on_gpu(program)
    takes = [float(each.num_tensors) if on_gpu else takes_ns(each) for each in program.optimizers]
    whole = sum(takes)
    return sum(taken for each, taken in zip(program.optimizers, takes, strict=True) if each in slow) / whole
