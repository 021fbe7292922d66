"""The idioms of a line that is marked in a script."""

from __future__ import annotations

from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.sources import Sources

FILE = "/train.py"


def of_marked(text: str, *functions: str, via: str = "") -> tuple[str, ...]:
    """The idioms of the line that ends in `# here`, in functions of these names, innermost first."""
    line = 1 + next(i for i, row in enumerate(text.splitlines()) if row.endswith("# here"))
    stack = [(FILE, line, functions[0] if functions else "<module>")]
    stack += [(FILE, 1, function) for function in functions[1:]]
    return Idioms(Places(Sources({FILE: text}))).of(stack, via)
