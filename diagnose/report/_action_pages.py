"""The actions as text: a list, one explained, and `docs/tuning.md`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping

from diagnose.actions.base import Action
from diagnose.core.plugins import discover
from diagnose.core.trial import ASKED_FOR, Safety
from diagnose.report._markdown import code, prose, sections
from diagnose.report._terminal import Terminal
from diagnose.report._text import wrapped
from diagnose.rules import Rule

MARK = "<!-- written by: diagnose actions --write -->"

MEANING = {
    Safety.EXACT: "computes bit for bit the same",
    Safety.ROUNDING: "the same arithmetic, rounded in another order",
    Safety.PRECISION: "computes with fewer bits",
    Safety.TRAINING: "changes what training does",
}

INTRODUCTION = """
`diagnose run --tune train.py` diagnoses the running job, tries the fixes that the findings name, one
after the other, and the few that only a trial can judge; of those that change how the model computes a few
passes beside the training tell first what they would win. It measures each on the job itself: neighbouring
windows of steps with the fix and without, in turn (A B B A), until a t interval on the ratios of the pairs
tells. What is faster stays in force; everything else is undone and checked to be undone. In the end all
kept fixes together are measured on against off: that is the number to believe. Every step of a trial is a
step of training.

    diagnose run --tune train.py                     # exact and rounding fixes
    diagnose run --tune --allow precision train.py   # bf16 and TF32, too
    diagnose run --tune --only loader-workers train.py
    diagnose run --dry-run train.py                  # what would be tried; changes nothing
    diagnose run --apply tuned.toml train.py         # what was kept before, without trials; confirmed once
    diagnose patch | git apply                       # for good, where a fix is a setting of the script

A fix that changes what is computed is first checked: the job computes one more step beside the training,
with the fix and without, and the difference must be within what the script's own rounding, or the noise
between its mini-batches, explains. An error of ours undoes everything, and training goes on.

Before a `precision` or `training` fix is tried, weights, buffers, the optimizer's state, gradient scalers
and random numbers are copied to the host, if they fit into half of its free memory. While such a fix is
tried or in force the training loss is watched, without ever waiting for a device. A loss that is no number
any more undoes the fix at the end of that step (in a job of several ranks, at their next exchange); during
the trial, weights and all are then put back, and the steps in between are lost. A loss that rises more
than it ever did by itself (a one-sided CUSUM) undoes the fix, too, unless a numerics check can be made and
passes: then the rise is the script's own. Learning rates, counters and what the script averages itself are
not turned back. In simulated runs (`python benchmarks/loss_alarms.py`) the watch gave no false alarm in 800
runs of 5000 healthy steps, and saw a loss that doubles at once in 99 of 100, after 49 steps in the median.

A fix that takes long to start, such as compiling, is not tried where the loops of the script tell how many
steps are left and these would win less. One that finds later that it must not stay, such as blocks that
compile again and again, is undone with its reason.
"""


def title(action: Action) -> str:
    """Returns what an action does, in a few words."""
    module = inspect.getmodule(type(action))
    return ((module.__doc__ if module else "") or "").strip().rstrip(".")


def tuning_page(actions: Mapping[str, Action], rules: Mapping[str, Rule]) -> str:
    """Returns `docs/tuning.md`."""
    rows = [
        f"| [{name}](#{name}) | {prose(title(action))} | {action.safety.value} | {_asked_by(name, rules)} |"
        for name, action in actions.items()
    ]
    classes = [f"- **{safety.value}**: {meaning}. {_leave(safety)}" for safety, meaning in MEANING.items()]
    parts = [
        MARK,
        "# Tuning a running job",
        INTRODUCTION.strip(),
        "## How safe a fix is",
        "\n".join(classes),
        "## The fixes",
        "\n".join(["| fix | what it does | numbers | asked for by |", "|---|---|---|---|", *rows]),
    ]
    for name, action in actions.items():
        parts += [f"### {name}", f"{prose(title(action))}. {_meaning(name, action, rules)}"]
        for heading, text in sections(inspect.getdoc(type(action)) or ""):
            parts += [f"#### {heading}"] if heading else []
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def actions_text(actions: Mapping[str, Action], terminal: Terminal) -> str:
    """Returns the list for a terminal."""
    longest = max(map(len, actions))
    lines = []
    for name, action in actions.items():
        first = f"{name:<{longest}}  {action.safety.value:<9}  "
        wrapped = textwrap.wrap(title(action), max(20, terminal.width - len(first)))
        lines.append(first + wrapped[0])
        lines += [" " * len(first) + more for more in wrapped[1:]]
    return "\n".join(lines) + "\n\nExplain one: diagnose actions NAME\n"


def action_text(name: str, action: Action, rules: Mapping[str, Rule], terminal: Terminal) -> str:
    """Returns the page of one action for a terminal."""
    lines = textwrap.wrap(f"{name}: {title(action)}", terminal.width)
    lines += ["", *textwrap.wrap(_meaning(name, action, rules), terminal.width)]
    asked = _asked_by(name, rules)
    by_hand = "name it in the file of --apply" if action.at_start else "name it with --only"
    lines += textwrap.wrap(f"Asked for by: {asked or f'no rule; {by_hand}'}.", terminal.width)
    for heading, text in sections(inspect.getdoc(type(action)) or ""):
        lines += ["", *([heading] if heading else [])]
        for paragraph in text.split("\n\n"):
            lines += wrapped(" ".join(paragraph.split()), terminal, "  " if heading else "")
    return "\n".join(lines).replace("`", "") + "\n"


def actions_json(actions: Mapping[str, Action], rules: Mapping[str, Rule]) -> dict[str, object]:
    """Returns the list for programs."""
    return {
        "schema": 1,
        "actions": [
            {
                "name": name,
                "title": title(action),
                "safety": action.safety.value,
                "rules": [rule for rule, each in rules.items() if name in each.actions],
                "excludes": sorted(action.excludes),
            }
            for name, action in actions.items()
        ],
    }


def built_in_actions() -> dict[str, Action]:
    """Returns every action by name. Imports torch."""
    from diagnose import actions

    return discover(actions, Action)


def _meaning(name: str, action: Action, rules: Mapping[str, Rule]) -> str:
    """What the fix does to the numbers, and when it is tried."""
    meaning = MEANING[action.safety]
    allow = f" --allow {action.safety.value}" if action.safety in ASKED_FOR else ""
    if action.at_start:
        when = "Not tried: it works from the first step on only, through `--apply`"
    elif action.unasked:
        when = f"`--tune{allow}` tries it though no finding asks for it: only a trial can tell"
    elif _asked_by(name, rules):
        when = f"`--tune{allow}` tries it where a finding asks for it"
    else:
        when = f"Tried only where it is named: `--tune{allow} --only {name}`"
    return f"{meaning[0].upper()}{meaning[1:]}. {when}."


def _leave(safety: Safety) -> str:
    return f"Only with `--allow {safety.value}`." if safety in ASKED_FOR else "`--tune` may try it."


def _asked_by(name: str, rules: Mapping[str, Rule]) -> str:
    return ", ".join(code(rule) for rule, each in rules.items() if name in each.actions)
