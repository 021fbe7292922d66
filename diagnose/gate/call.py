"""Calls a function of a file as a gate's training command: `python -m diagnose.gate.call FILE NAME`."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path

from diagnose.core.errors import DiagnoseError


def main() -> None:
    """Loads the file as the module that its folder makes it, and calls the function without arguments."""
    file, name = Path(sys.argv[1]).absolute(), sys.argv[2]
    del sys.argv[1:]
    sys.path[:0] = [str(file.parent), os.getcwd()]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise DiagnoseError(f"gate: there is no Python file {file} in this version.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # workers that are started anew look for it there
    spec.loader.exec_module(module)
    try:
        function = functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        raise DiagnoseError(f"gate: {file} has no {name} in this version.") from None
    function()  # type: ignore[operator]  # any of the user's


if __name__ == "__main__":
    main()
