"""The idioms of a line that is marked in a script."""

from __future__ import annotations

from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.sources import Sources

FILE = "/train.py"


def of_marked(
    text: str, *functions: str, phase: Phase = Phase.OTHER, via: str = "", **options: bool
) -> tuple[str, ...]:
    """The idioms of the line that ends in `# here`, in functions of these names, innermost first.

    Each function's line is the one with its name in it and `# by`, where there is one.
    """
    rows = text.splitlines()
    line = 1 + next(i for i, row in enumerate(rows) if row.endswith("# here"))
    stack = [(FILE, line, functions[0] if functions else "<module>")]
    for function in functions[1:]:
        called = [i for i, row in enumerate(rows) if row.endswith(f"# by {function}")]
        stack.append((FILE, 1 + called[0] if called else 1, function))
    return Idioms(Places(Sources({FILE: text}))).of(stack, via, phase, **options)
