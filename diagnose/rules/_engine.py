"""Asks every rule, and lets each nanosecond of the step have one cause."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from diagnose.core.errors import DiagnoseError
from diagnose.core.finding import Abstention, Finding
from diagnose.core.phases import Phase
from diagnose.core.plugins import discover
from diagnose.core.profile import Profile, Status
from diagnose.rules._own import own_rules
from diagnose.rules._traps import traps
from diagnose.rules.base import WORTH_SHARE, Rule

BESIDE_DEVICE = "; nothing is won where the device had work queued meanwhile"

WAITED_IN = (Phase.DATA_WAIT, Phase.COPY)
"""Phases that take what the device is behind where the host's clock counts: a batch is on it before it goes
on, and the work of the step before is what it waits for."""

SUPPLY = (Phase.DATA_WAIT, Phase.GC)
"""Phases in which rules blame what the first rank's loader or objects do, whatever the other ranks' do."""

EXPLAINED_SHARE = 0.5
"""A finding that keeps less than this part of its time beside more exact ones was only their shadow."""

OTHER_FAULT_SHARE, OTHER_FAULT_PART = 0.08, 1 / 3
"""Unless it keeps this share of the step, and this part of its time, beside those that explain it: that is
more than they are wrong by, and a second fault, as where some lines grow and others just take long. Not of
its input: what a loader waits for has one cure."""

LIMIT_WEIGHT = 0.5
"""What is mended by a line comes before what takes another design, unless that costs twice as much."""


def built_in() -> dict[str, Rule]:
    """Returns the rules of this folder by name."""
    from diagnose import rules as package

    return discover(package, Rule)  # type: ignore[type-abstract]


def rules() -> dict[str, Rule]:
    """Returns every rule by name: the built-in ones, then those of installed packages.

    Raises:
        DiagnoseError: If a package's rule has a name that is taken.
    """
    ours = built_in()
    own = own_rules(ours)
    if own.clashes:
        raise DiagnoseError("\n".join(own.clashes))
    return {**ours, **own.rules}


def find_rule(name: str, known: Mapping[str, Rule]) -> Rule:
    """Returns the rule of a name.

    Raises:
        DiagnoseError: If there is none; the message names the nearest.
    """
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise DiagnoseError(f"there is no rule {name[:60]!r}.{hint}\nList them: diagnose rules")


def diagnosed(profile: Profile) -> Profile:
    """Returns the profile with its findings, the most costly first, and the rules that had to abstain.

    A run with too few steps has no findings: its figures are not yet those of a usual step. A rule that
    cannot be loaded, or fails, becomes a note; the others are asked.
    """
    from diagnose.analysis.composition import MIN_STEPS  # with numpy, which listing the rules does not need

    too_few = (
        profile.status in (Status.NO_STEPS, Status.TOO_FEW_STEPS) or profile.steps.measured < MIN_STEPS
    )
    if too_few or not profile.step_time_ns:
        return profile
    ours = built_in()
    own = own_rules(ours)
    asked = {**ours, **own.rules}
    failures: list[str] = []
    findings, abstained = ask(asked, profile, failures)
    return replace(
        profile,
        findings=findings,
        abstained=abstained,
        num_rules=len(asked),
        notes=(*profile.notes, *traps(profile), *own.clashes, *own.broken, *failures),
    )


def ask_one(rule: Rule, profile: Profile) -> Finding | None:
    """Asks one rule, as if there were no other."""
    findings, _ = ask({rule.name: rule}, profile)
    return findings[0] if findings else None


def ask(
    asked: Mapping[str, Rule], profile: Profile, failures: list[str] | None = None
) -> tuple[tuple[Finding, ...], tuple[Abstention, ...]]:
    """Asks rules of a profile; returns their findings, ranked, and who abstained.

    Args:
        asked: Rules by name; a finding bears the name that its rule has here.
        profile: The run.
        failures: Gets a sentence about each rule that raises; without it, exceptions get through.
    """
    found: list[Finding] = []
    abstained: list[Abstention] = []
    for name, rule in asked.items():
        try:
            answer = _answer(name, rule, profile)
        except Exception as error:  # a rule that fails must not take the report of a long run with it
            if failures is None:
                raise
            failures.append(f"rule {name} failed, a bug of the rule: {type(error).__name__}: {error}")
            continue
        if isinstance(answer, Finding):
            found.append(answer)
        elif answer is not None:
            abstained.append(answer)
    spoiled = {name for finding in found for name in asked[finding.rule].spoils}
    found = [finding for finding in found if finding.rule not in spoiled]
    residual = tuple(name for name, rule in asked.items() if rule.residual)
    vaguer: dict[str, tuple[str, ...]] = {}
    for finding in found:
        rule = asked[finding.rule]
        names = (*rule.explained(finding, profile), *_of_no_rank(finding, found, profile, asked))
        vaguer[finding.rule] = names if rule.residual else (*names, *residual)
    limits = tuple(name for name, rule in asked.items() if rule.is_limit)
    return tuple(ranked(found, vaguer, profile, residual, limits)), tuple(abstained)


def _of_no_rank(
    finding: Finding, found: Iterable[Finding], profile: Profile, asked: Mapping[str, Rule]
) -> list[str]:
    """Returns the rules that see less exactly what is found of the first rank: that it waits longer for its
    input than the others, say. They blame what its loader does, as if all ranks' did it as long."""
    if not profile.ranks or profile.ranks[0].rank not in finding.ranks or not _supplies(finding):
        return []
    return [
        other.rule
        for other in found
        if not other.ranks and _supplies(other) and finding.rule not in asked[other.rule].explains
    ]


def _supplies(finding: Finding) -> bool:
    """Whether most of what a finding claims is of the phases that no rank's computing is in."""
    supplied_ns = sum(finding.lost_ns.get(phase, 0.0) for phase in SUPPLY)
    return 2 * supplied_ns > finding.lost_ns_per_step


def _answer(name: str, rule: Rule, profile: Profile) -> Finding | Abstention | None:
    if not rule.applies(profile):
        return None
    missing = [need for need in rule.needed(profile) if reading(profile, need) is None]
    if missing:
        return Abstention(rule=name, missing=missing[0])
    finding = rule.check(profile)
    if finding is None:
        return None
    finding = finding if finding.rule == name else replace(finding, rule=name)
    if profile.run.device == "cpu":
        return finding
    exposed = _while_idle(rule, finding, profile)
    return _in_doubt(rule, exposed, profile) if exposed is not None else None


def _while_idle(rule: Rule, finding: Finding, profile: Profile) -> Finding | None:
    """Leaves of what the host lost what the accelerator may have been idle for meanwhile, at most: in each
    phase as its events tell, and in all as the driver does, who knows when it worked within a phase."""
    if not rule.of_host:
        return finding
    device, lost = profile.device, finding.lost_ns
    if device.idle_at_most_ns is not None:
        lost = {phase: min(ns, device.idle_at_most_ns.get(phase, 0.0)) for phase, ns in lost.items()}
    lost_ns = sum(lost.values())
    # Not `busy_share`, which may be of a deep window's few steps.
    if device.utilisation_share is not None and device.other_processes == 0 and lost_ns:
        part = min(1.0, (1 - device.utilisation_share) * profile.step_time_ns / lost_ns)
        lost = {phase: part * ns for phase, ns in lost.items()}
    part = sum(lost.values()) / finding.lost_ns_per_step
    if part in (0, 1):
        return finding if part else None
    return replace(finding, lost_ns=lost, low_ns=part * finding.low_ns, high_ns=part * finding.high_ns)


def _in_doubt(rule: Rule, finding: Finding, profile: Profile) -> Finding:
    """Promises nothing of what an accelerator may not have waited for: where the host alone was heard."""
    if rule.of_host:
        doubtful = 1.0
    elif profile.device_clock_share is None:
        waited_ns = sum(finding.lost_ns.get(phase, 0.0) for phase in WAITED_IN)
        doubtful = waited_ns / finding.lost_ns_per_step
    else:
        return finding
    if not doubtful:
        return finding
    low_ns = finding.low_ns * max(0.0, 1 - doubtful)
    return replace(finding, low_ns=low_ns, assumption=finding.assumption + BESIDE_DEVICE)


def reading(profile: Profile, path: str) -> Any:
    """Returns what `path`, such as `host.runnable_share`, leads to; `None` where it leads nowhere."""
    value: Any = profile
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            return None
    return value


def ranked(
    found: Iterable[Finding],
    explains: Mapping[str, tuple[str, ...]],
    profile: Profile,
    residual: Collection[str] = (),
    limits: Collection[str] = (),
) -> list[Finding]:
    """Returns findings that share no time, the most costly first; one of a rule of `limits` comes before a
    fault only if it costs twice as much.

    The more exact takes its time first, then the larger; each later one keeps what is left of the phases it
    claims. One that sees the same time less exactly loses what the exact one takes, also where the phase
    has more; a `residual` rule sees other time, too. Together they never claim more of a phase than it has.
    """
    left = dict(profile.phase_time_ns)
    explained: dict[tuple[str, Phase], float] = defaultdict(float)
    kept: list[Finding] = []
    for finding in _exact_first(list(found), explains):
        shares = {
            phase: max(0.0, min(lost - explained[finding.rule, phase], left.get(phase, 0.0)))
            for phase, lost in finding.lost_ns.items()
        }
        rest = sum(shares.values())
        part = rest / finding.lost_ns_per_step
        if rest < WORTH_SHARE * profile.step_time_ns:
            continue
        beside = not _supplies(finding) and any(explained[finding.rule, phase] for phase in finding.lost_ns)
        enough = beside and rest >= OTHER_FAULT_SHARE * profile.step_time_ns
        if part < (OTHER_FAULT_PART if enough else EXPLAINED_SHARE):
            continue
        for phase, lost in shares.items():
            left[phase] = left.get(phase, 0.0) - lost
            for vaguer in set(explains.get(finding.rule, ())) - set(residual):
                explained[vaguer, phase] += lost
        kept.append(
            finding
            if part == 1
            else replace(
                finding, lost_ns=shares, low_ns=finding.low_ns * part, high_ns=finding.high_ns * part
            )
        )

    def rank(finding: Finding) -> float:
        return finding.lost_ns_per_step * (LIMIT_WEIGHT if finding.rule in limits else 1.0)

    return sorted(kept, key=rank, reverse=True)


def _exact_first(found: list[Finding], explains: Mapping[str, tuple[str, ...]]) -> list[Finding]:
    """Orders findings so that each comes after all that explain it, else by the time they claim."""
    pending = sorted(found, key=lambda finding: -finding.lost_ns_per_step)
    ordered: list[Finding] = []
    while pending:
        names = {finding.rule for finding in pending}
        free = [
            finding
            for finding in pending
            if not any(finding.rule in explains.get(name, ()) for name in names - {finding.rule})
        ]
        first = free[0] if free else pending[0]  # rules that explain each other: the larger one
        ordered.append(first)
        pending.remove(first)
    return ordered
