"""Runs a script that does not save its weights, and saves them when it has ended.

    python weights_at_end.py SCRIPT [ARGUMENTS]

Saves the state of every module left in the script's globals to `weights.pt`. Only for such scripts: the
compatibility benchmark hands every other script to Python, and to `diagnose run`, as it is.
"""

from __future__ import annotations

import runpy
import sys

import torch

script = sys.argv[1]
del sys.argv[0]
left = runpy.run_path(script, run_name="__main__")
models = {name: value for name, value in left.items() if isinstance(value, torch.nn.Module)}
torch.save({name: model.state_dict() for name, model in models.items()}, "weights.pt")
