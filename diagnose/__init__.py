"""Says where every millisecond of a PyTorch training step goes.

`diagnose run train.py` needs no change to the script. For a notebook or a debugger there are four
functions: `attach()` begins measuring in this process, `detach()` ends it and returns the profile,
`step()` marks the end of a step in a loop that `torch.optim` does not drive, and `read_steps()` returns the
steps of a recorded run as a table of pandas.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagnose.analysis.table import read_steps
    from diagnose.launch.session import attach, detach, step

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "detach", "read_steps", "step"]

# In a checkout, kernels/ and dashboards/ stand beside this package, not inside it.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "kernels")):
    __path__.append(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def __getattr__(name: str) -> Any:
    if name in ("attach", "detach", "step"):
        from diagnose.launch import session

        return getattr(session, name)
    if name == "read_steps":
        from diagnose.analysis import table

        return table.read_steps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
