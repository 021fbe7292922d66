"""Runs a script with the lines that another tool asks its user to add: `peers_job.py TOOL SCRIPT [ARGS]`.

TraceML wants the body of the training loop, which the scripts mark by a comment, in `trace_step(model)`;
gpuprof wants the whole of it in `profile(name)`. What they say goes to `gpuprof.json`, or to TraceML's own
files.
"""

from __future__ import annotations

import ast
import json
import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

MARK = "# the training loop"


class Wrapped(ast.NodeTransformer):
    """Puts the body of the marked loop into `with _step():`."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def visit_For(self, loop: ast.For | ast.While) -> ast.AST:
        self.generic_visit(loop)
        if MARK in self.lines[loop.body[0].lineno - 2]:
            context = ast.Call(func=ast.Name(id="_step", ctx=ast.Load()), args=[], keywords=[])
            loop.body = [ast.With(items=[ast.withitem(context_expr=context)], body=loop.body)]
        return loop

    visit_While = visit_For


def model_of(frame: FrameType) -> nn.Module:
    """Returns the first model among the variables of the loop's function, its object and its file."""
    owner = frame.f_locals.get("self")
    for names in (frame.f_locals, vars(owner) if owner is not None else {}, frame.f_globals):
        found = [value for value in names.values() if isinstance(value, nn.Module)]
        trained = [model for model in found if any(p.requires_grad for p in model.parameters())]
        if trained:
            return trained[0]
    return nn.Identity()


def run_traceml(script: Path) -> None:
    import traceml_ai as traceml

    traceml.init()
    source = script.read_text(encoding="utf-8")
    tree = ast.fix_missing_locations(Wrapped(source.splitlines()).visit(ast.parse(source)))
    names: dict[str, Any] = {
        "__name__": "__main__",
        "__file__": str(script),
        "_step": lambda: traceml.trace_step(model_of(sys._getframe(1))),
    }
    sys.modules["__main__"].__dict__.update(names)  # where worker processes look for the dataset's class
    exec(compile(tree, str(script), "exec"), sys.modules["__main__"].__dict__)


def run_gpuprof(script: Path, out: Path) -> None:
    import gpuprof
    from gpuprof.insights import analyze

    with gpuprof.profile("job", db_path="gpuprof.db"):
        runpy.run_path(str(script), run_name="__main__")
    out.write_text(json.dumps(analyze("gpuprof.db", 1)["insights"], default=str))


def main() -> None:
    _, tool, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    if tool == "traceml":
        run_traceml(Path(script))
    else:
        run_gpuprof(Path(script), Path("gpuprof.json").resolve())


if __name__ == "__main__":
    main()
