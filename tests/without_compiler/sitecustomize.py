"""For scripts that tests start: torch's compiler is imported once something of it is needed.

torch imports it when a process makes its first optimizer, to ask it to leave functions alone: two of the
five seconds of CPU time that a short script takes. A compiler that nobody has used leaves everything alone.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class Unused(ModuleType):
    """Stands for the compiler until another attribute of it is asked for than optimizers need."""

    def disable(self, fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        return (lambda function: function) if fn is None else fn

    def graph_break(self, msg: str = "") -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # whoever looks through all modules asks for these
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        module = importlib.import_module(NAME)
        sys.modules["torch"].__dict__["_dynamo"] = module
        return getattr(module, name)


sys.modules[NAME] = Unused(NAME)
