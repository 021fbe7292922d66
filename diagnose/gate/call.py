"""Calls a function as a gate's training command: `python -m diagnose.gate.call FILE MODULE NAME`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from diagnose.core.errors import DiagnoseError


def main() -> None:
    """Loads the file as the module that it is to its user, and calls the function without arguments."""
    file, module, name = Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3]
    del sys.argv[1:]
    if not file.is_file():
        raise DiagnoseError(f"gate: there is no Python file {file} in this version.")
    source = file.parent if file.stem == "__init__" else file
    sys.path[:0] = [str(source.parents[module.count(".")]), os.getcwd()]
    loaded = _loaded(file, module)
    try:
        function = functools.reduce(getattr, name.split("."), loaded)
    except AttributeError:
        raise DiagnoseError(f"gate: {file} has no {name} in this version.") from None
    function()  # type: ignore[operator]  # any of the user's


def _loaded(file: Path, name: str) -> ModuleType:
    """Loads this very file, even where a module of its name is loaded already, such as one of ours."""
    package, _, own_name = name.rpartition(".")
    if package:
        importlib.import_module(package)
        known = sys.modules.get(name)
        if known is not None:  # its package imports it
            return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise DiagnoseError(f"gate: {file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # workers that are started anew look for it there
    spec.loader.exec_module(module)
    if package:
        setattr(sys.modules[package], own_name, module)
    return module


if __name__ == "__main__":
    main()
